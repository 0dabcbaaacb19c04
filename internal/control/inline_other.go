//go:build !unix

package control

import "net"

// inlineWriter does nothing here: everything goes through the writer's goroutine.
type inlineWriter struct{}

func newInlineWriter(net.Conn) *inlineWriter { return nil }

func (*inlineWriter) write([]byte) int { return 0 }
