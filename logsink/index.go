package logsink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// The index of an attempt's log is a header of 512 bytes and one record of 24 bytes per chunk, at the place that the
// chunk's sequence gives it. So a repeated chunk writes the same bytes to the same place, whoever writes it, and a chunk
// that has not come yet is a record of zeros. All numbers are little-endian.
//
//	header  0 "MLRI", 4 version, 5 flags (1: the end is known), 8 chunks that were synced with all before them,
//	        16 total bytes, 24 dropped bytes, 32 chunks, 40 SHA-256 (32), 72 length of the worker's id (2), 74 the id
//	record  0 offset in the log (8), 8 size (4), 12 stream, 13 flags (1: present, 2: stands for dropped bytes),
//	        16 time the first byte was read, in microseconds since 1970
const (
	indexMagic   = "MLRI"
	indexVersion = 1
	headerSize   = 512
	recordSize   = 24

	flagEnded = 1

	recordPresent = 1
	recordDropped = 2

	// maxSequence and maxOffset bound what a chunk may ask for, far above any real log.
	maxSequence = 1 << 32
	maxOffset   = 1 << 40
	maxWorker   = 300
)

var errIndexFormat = errors.New("not an index of this version")

type record struct {
	offset  uint64
	size    uint32
	stream  uint8
	dropped bool
	at      time.Time
}

func (r record) end() uint64 { return r.offset + uint64(r.size) }

func (r record) encode() [recordSize]byte {
	var b [recordSize]byte
	binary.LittleEndian.PutUint64(b[0:], r.offset)
	binary.LittleEndian.PutUint32(b[8:], r.size)
	b[12] = r.stream
	b[13] = recordPresent
	if r.dropped {
		b[13] |= recordDropped
	}
	binary.LittleEndian.PutUint64(b[16:], uint64(r.at.UnixMicro()))
	return b
}

// decodeRecord reports false for a chunk that is not there.
func decodeRecord(b []byte) (record, bool) {
	if b[13]&recordPresent == 0 {
		return record{}, false
	}
	return record{
		offset:  binary.LittleEndian.Uint64(b[0:]),
		size:    binary.LittleEndian.Uint32(b[8:]),
		stream:  b[12],
		dropped: b[13]&recordDropped != 0,
		at:      time.UnixMicro(int64(binary.LittleEndian.Uint64(b[16:]))),
	}, true
}

func recordPlace(sequence uint64) int64 { return headerSize + int64(sequence)*recordSize }

type header struct {
	synced uint64
	worker string
	end    *millracev1.LogEnd // nil while unknown
}

func newHeader(worker string) []byte {
	b := make([]byte, headerSize)
	copy(b, indexMagic)
	b[4] = indexVersion
	binary.LittleEndian.PutUint16(b[72:], uint16(len(worker)))
	copy(b[74:], worker)
	return b
}

func readHeader(f *os.File) (header, error) {
	b := make([]byte, headerSize)
	if _, err := f.ReadAt(b, 0); err != nil {
		if errors.Is(err, io.EOF) {
			err = errIndexFormat
		}
		return header{}, err
	}
	n := int(binary.LittleEndian.Uint16(b[72:]))
	if string(b[:4]) != indexMagic || b[4] != indexVersion || n > maxWorker {
		return header{}, fmt.Errorf("%s: %w", f.Name(), errIndexFormat)
	}
	h := header{synced: binary.LittleEndian.Uint64(b[8:]), worker: string(b[74 : 74+n])}
	if b[5]&flagEnded != 0 {
		h.end = &millracev1.LogEnd{
			TotalBytes:   binary.LittleEndian.Uint64(b[16:]),
			DroppedBytes: binary.LittleEndian.Uint64(b[24:]),
			Chunks:       binary.LittleEndian.Uint64(b[32:]),
			Sha256:       append([]byte(nil), b[40:72]...),
		}
	}
	return h, nil
}

func writeEnd(f *os.File, end *millracev1.LogEnd) error {
	var b [56]byte
	binary.LittleEndian.PutUint64(b[0:], end.GetTotalBytes())
	binary.LittleEndian.PutUint64(b[8:], end.GetDroppedBytes())
	binary.LittleEndian.PutUint64(b[16:], end.GetChunks())
	copy(b[24:], end.GetSha256())
	if _, err := f.WriteAt(b[:], 16); err != nil {
		return err
	}
	// The flag comes second, so that whoever sees it sees the numbers.
	_, err := f.WriteAt([]byte{flagEnded}, 5)
	return err
}

func writeSynced(f *os.File, chunks uint64) error {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], chunks)
	_, err := f.WriteAt(b[:], 8)
	return err
}
