package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

func healthcheckCmd(u *ui) *cobra.Command {
	var addr string
	var ready bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use: "healthcheck", GroupID: groupServices, Short: "Ask a service whether it is well, for containers",
		Long: `Ask the service at --addr, or else at MILLRACE_OPS_ADDR, for /healthz; with --ready for /readyz. The exit code is 0 when
it says yes, 1 otherwise.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if addr == "" {
				addr = os.Getenv("MILLRACE_OPS_ADDR")
			}
			if addr == "" {
				return fmt.Errorf("no address: set MILLRACE_OPS_ADDR as for the service, or use --addr host:port")
			}
			path := "/healthz"
			if ready {
				path = "/readyz"
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			answer, err := askHealth(ctx, addr, path)
			if err != nil {
				return &exitError{code: 1, err: err}
			}
			_, err = fmt.Fprintln(u.out, answer)
			return err
		},
	}
	cmd.Flags().StringVar(&addr, "addr", "", "address of the service's ops server")
	cmd.Flags().BoolVar(&ready, "ready", false, "ask whether it can take work, not only whether it runs")
	cmd.Flags().DurationVar(&timeout, "timeout", 3*time.Second, "how long to wait for the answer")
	return cmd
}

func askHealth(ctx context.Context, addr, path string) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", fmt.Errorf("%s is not an address: write host:port", addr)
	}
	// A service that listens on all interfaces is asked on the loopback one.
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
		if ip != nil && ip.To4() == nil {
			host = "::1"
		}
	}
	url := "http://" + net.JoinHostPort(host, port) + path
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := (&http.Client{Timeout: 10 * time.Second}).Do(req)
	if err != nil {
		return "", fmt.Errorf("%w: is the service running with MILLRACE_OPS_ADDR=%s?", err, addr)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
	text := strings.TrimSpace(string(body))
	if err != nil || resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s answers %s: %s", url, resp.Status, text)
	}
	return text, nil
}
