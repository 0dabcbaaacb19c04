package redistest

import (
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
)

// Ports are taken from below the range that the kernel gives to outgoing
// connections (32768 and up on Linux): a port that must still be free after a
// restart or a cut is then not lost to somebody's dial in between.
const (
	firstPort = 20000
	lastPort  = 32000
)

// freePort returns a loopback TCP port that nobody listens on at the moment.
func freePort() (int, error) {
	for range 200 {
		port := firstPort + rand.IntN(lastPort-firstPort)
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			continue
		}
		return port, l.Close()
	}
	return 0, errors.New("no free TCP port found between 20000 and 32000")
}
