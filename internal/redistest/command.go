package redistest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"
)

// command sends one command to the server at a Unix socket and returns its
// reply as text; replies that are arrays are not supported.
func command(socket string, timeout time.Duration, args ...string) (string, error) {
	conn, err := net.DialTimeout("unix", socket, timeout)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return "", err
	}
	var req strings.Builder
	fmt.Fprintf(&req, "*%d\r\n", len(args))
	for _, arg := range args {
		fmt.Fprintf(&req, "$%d\r\n%s\r\n", len(arg), arg)
	}
	if _, err := io.WriteString(conn, req.String()); err != nil {
		return "", err
	}
	return readReply(bufio.NewReader(conn))
}

func readReply(r *bufio.Reader) (string, error) {
	line, err := r.ReadString('\n')
	if err != nil {
		return "", err
	}
	line = strings.TrimRight(line, "\r\n")
	if line == "" {
		return "", errors.New("empty reply")
	}
	switch kind, rest := line[0], line[1:]; kind {
	case '+', ':':
		return rest, nil
	case '-':
		return "", errors.New(rest)
	case '$':
		return readBulk(r, rest)
	default:
		return "", fmt.Errorf("reply %q is of a kind that redistest does not read", line)
	}
}

func readBulk(r *bufio.Reader, length string) (string, error) {
	n, err := strconv.Atoi(length)
	if err != nil {
		return "", fmt.Errorf("bulk length %q: %w", length, err)
	}
	if n < 0 {
		return "", nil
	}
	buf := make([]byte, n+len("\r\n"))
	if _, err := io.ReadFull(r, buf); err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}
