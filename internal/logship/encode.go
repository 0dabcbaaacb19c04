package logship

import (
	"fmt"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// packMinimum is the size from which a chunk is worth packing; below it the frame costs what it saves.
const packMinimum = 4 << 10

// packer packs chunks with zstd. The encoder is made at first use: most agents' tasks print little, and its tables
// are a good part of what an idle agent may weigh.
type packer struct {
	enabled bool
	once    sync.Once
	enc     *zstd.Encoder
}

// pack returns data packed, or nil when that does not pay.
func (p *packer) pack(data []byte) []byte {
	if !p.enabled || len(data) < packMinimum {
		return nil
	}
	p.once.Do(func() {
		// The options are constants that zstd accepts, so the error cannot happen; without an encoder we send plain.
		p.enc, _ = zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(2),
			zstd.WithWindowSize(128<<10), zstd.WithLowerEncoderMem(true), zstd.WithEncoderCRC(false))
	})
	if p.enc == nil {
		return nil
	}
	packed := p.enc.EncodeAll(data, make([]byte, 0, len(data)/2))
	if len(packed) > len(data)-len(data)/8 {
		return nil
	}
	return packed
}

// chunk makes a LogChunk of the attempt; the caller sets the place.
func (l *Log) chunk(stream uint32, data []byte, at time.Time) *millracev1.LogChunk {
	c := &millracev1.LogChunk{
		Task: l.a.Task, Attempt: l.a.Attempt, Worker: l.a.Worker, Date: l.a.Date,
		Stream: stream, Data: data, Size: uint64(len(data)), At: timestamppb.New(at),
	}
	if packed := l.s.packer.pack(data); packed != nil {
		c.Data, c.Compression = packed, millracev1.LogChunk_COMPRESSION_ZSTD
	}
	return c
}

// encode cannot fail: every string of a chunk is checked to be UTF-8 before it gets here, and bytes always encode.
func encode(c *millracev1.LogChunk) []byte {
	b, err := proto.Marshal(c)
	if err != nil {
		panic(fmt.Sprintf("encode a log chunk of task %q: %v", c.GetTask(), err))
	}
	return b
}

var unpacker = sync.OnceValues(func() (*zstd.Decoder, error) {
	return zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(recordMax))
})

// output returns the bytes of a chunk before packing.
func output(c *millracev1.LogChunk) ([]byte, error) {
	if c.GetCompression() == millracev1.LogChunk_COMPRESSION_UNSPECIFIED {
		return c.GetData(), nil
	}
	dec, err := unpacker()
	if err != nil {
		return nil, err
	}
	data, err := dec.DecodeAll(c.GetData(), nil)
	if err != nil {
		return nil, fmt.Errorf("unpack a chunk: %w", err)
	}
	return data, nil
}

func dropMarker(dropped uint64) []byte {
	return fmt.Appendf(nil, "\n[millrace: %d bytes left out here]\n", dropped)
}

// markerRoom is more than a marker and the names in two chunks take.
const markerRoom = 1 << 10

// markerMax is the length of the longest marker.
const markerMax = 64
