package logship

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"syscall"
)

// A spool file is a row of records, each a length, a CRC-32 (both 4 bytes, little-endian) and an encoded LogChunk. Its
// writer holds a lock on it, so that a file without one is known to be left behind by an agent that ended.
const (
	recordHeader = 8
	// recordMax is far above any chunk; a larger length is a torn or foreign file.
	recordMax = 8 << 20
)

var errSpoolFull = errors.New("the log spool has reached its limit")

type spool struct {
	s     *Shipper
	f     *os.File
	read  int64
	write int64
}

// newSpool makes and locks a file that no other agent has.
func (s *Shipper) newSpool(task string, attempt uint32, ext string) (*spool, error) {
	f, err := os.CreateTemp(s.cfg.SpoolDir, fmt.Sprintf("%s@%d@*%s", task, attempt, ext))
	if err != nil {
		return nil, err
	}
	if err := lockFile(f); err != nil {
		return nil, errors.Join(err, f.Close(), os.Remove(f.Name()))
	}
	return &spool{s: s, f: f}, nil
}

func lockFile(f *os.File) error {
	return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
}

func (p *spool) append(b []byte) error {
	n := int64(recordHeader + len(b))
	if p.s.spooled.Add(n) > p.s.cfg.SpoolLimit {
		p.s.spooled.Add(-n)
		return errSpoolFull
	}
	rec := make([]byte, 0, n)
	rec = binary.LittleEndian.AppendUint32(rec, uint32(len(b)))
	rec = binary.LittleEndian.AppendUint32(rec, crc32.ChecksumIEEE(b))
	rec = append(rec, b...)
	// A write that fails half-way is overwritten by the next one, because the place is ours and not the file's end.
	if _, err := p.f.WriteAt(rec, p.write); err != nil {
		p.s.spooled.Add(-n)
		return err
	}
	p.write += n
	p.s.metrics.spooled.Add(float64(n))
	return nil
}

// next reads the record at the read position; io.EOF at the end.
func (p *spool) next() ([]byte, error) {
	if p.read >= p.write {
		return nil, io.EOF
	}
	b, err := readRecord(p.f, p.read)
	if err != nil {
		return nil, err
	}
	p.read += int64(recordHeader + len(b))
	return b, nil
}

func readRecord(r io.ReaderAt, at int64) ([]byte, error) {
	var head [recordHeader]byte
	if _, err := r.ReadAt(head[:], at); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n == 0 || n > recordMax {
		return nil, fmt.Errorf("spool record of %d bytes", n)
	}
	b := make([]byte, n)
	if _, err := r.ReadAt(b, at+recordHeader); err != nil {
		return nil, err
	}
	if crc32.ChecksumIEEE(b) != binary.LittleEndian.Uint32(head[4:]) {
		return nil, errors.New("spool record is damaged")
	}
	return b, nil
}

// remove deletes the file: all of it was accepted.
func (p *spool) remove() {
	p.s.spooled.Add(-p.write)
	_ = os.Remove(p.f.Name())
	_ = p.f.Close()
}

// keep closes the file and leaves it for the next agent.
func (p *spool) keep() error {
	return errors.Join(p.f.Truncate(p.write), p.f.Sync(), p.f.Close())
}
