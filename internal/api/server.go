package api

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"runtime/debug"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/millrace/millrace/internal/logkey"
	"github.com/millrace/millrace/internal/protojs"
	"github.com/millrace/millrace/internal/spec"
	"github.com/millrace/millrace/proto/millrace/v1/millracev1connect"
)

const (
	// requestOverhead is what a request may be larger than a task: JSON writes bytes as base64 and spells out names.
	requestOverhead = 64 << 10
	// bodyPatience bounds how long a client may take to send a request.
	bodyPatience = 30 * time.Second
	// writePatience bounds how long a client may leave one piece of a stream unread.
	writePatience = time.Minute
)

func (a *API) routes() http.Handler {
	// JSON is up to a third larger than the bytes it carries in base64, and a task may be nothing but bytes.
	limit := a.taskBytes()*3/2 + requestOverhead
	opts := []connect.HandlerOption{
		connect.WithCodec(protojs.Codec{}),
		connect.WithCodec(protojs.Codec{Label: protojs.CodecNameCharset}),
		connect.WithReadMaxBytes(limit),
		connect.WithCompressMinBytes(1 << 10),
		connect.WithInterceptors(a.metrics),
		connect.WithRecover(a.recovered),
	}
	mux := http.NewServeMux()
	mux.Handle(millracev1connect.NewTaskServiceHandler((*taskService)(a), opts...))
	mux.Handle(millracev1connect.NewFleetServiceHandler((*fleetService)(a), opts...))
	return a.guard(http.MaxBytesHandler(mux, int64(limit)+requestOverhead))
}

func (a *API) taskBytes() int {
	if a.cfg.Limits.TaskBytes > 0 {
		return a.cfg.Limits.TaskBytes
	}
	return spec.DefaultLimit
}

var errorWriter = connect.NewErrorWriter(connect.WithCodec(protojs.Codec{}))

// guard lets in who shows the token, and gives the body of a request a time to arrive in.
func (a *API) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := a.allowed(r); err != nil {
			a.metrics.refused.Inc()
			deny(w, r, err)
			return
		}
		rc := http.NewResponseController(w)
		// Not supported by every ResponseWriter, of tests for example; the server's own limits remain.
		_ = rc.SetReadDeadline(time.Now().Add(bodyPatience))
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), controllerKey{}, rc)))
	})
}

// controllerKey finds the http.ResponseController of a call.
type controllerKey struct{}

// bodyArrived lifts the deadline on the request. Left in place it would, on HTTP/1, end a call that waits longer than
// that: the server goes on reading to notice a client that leaves, and takes a time-out there for one.
func bodyArrived(ctx context.Context) {
	if rc, ok := ctx.Value(controllerKey{}).(*http.ResponseController); ok {
		_ = rc.SetReadDeadline(time.Time{})
	}
}

// writeUntil sets the time until which the client must have taken what is written; the zero time lifts it.
func writeUntil(ctx context.Context, t time.Time) {
	if rc, ok := ctx.Value(controllerKey{}).(*http.ResponseController); ok {
		_ = rc.SetWriteDeadline(t)
	}
}

// allowed asks for the token when there is one. Without, the server listens on loopback only, and what must be kept
// out is a web page in a local browser whose host name was made to resolve to 127.0.0.1.
func (a *API) allowed(r *http.Request) *connect.Error {
	if a.cfg.Token == "" {
		if isLocalHost(r.Host) {
			return nil
		}
		return connect.NewError(connect.CodePermissionDenied,
			errors.New("without MILLRACE_TOKEN the API answers only to 127.0.0.1, [::1] and localhost"))
	}
	given, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if ok && a.cfg.Token.Equal(given) {
		return nil
	}
	if !ok {
		return connect.NewError(connect.CodeUnauthenticated,
			errors.New("a token is needed: set MILLRACE_TOKEN, or send Authorization: Bearer <token>"))
	}
	return connect.NewError(connect.CodeUnauthenticated, errors.New("the token is not the dispatcher's: check MILLRACE_TOKEN"))
}

// deny answers in the protocol that the client speaks, so that it sees the text.
func deny(w http.ResponseWriter, r *http.Request, err *connect.Error) {
	if err.Code() == connect.CodeUnauthenticated {
		w.Header().Set("WWW-Authenticate", `Bearer realm="millrace"`)
	}
	if errorWriter.IsSupported(r) {
		_ = errorWriter.Write(w, r, err) // an error is the reader's: it has left
		return
	}
	status := http.StatusForbidden
	if err.Code() == connect.CodeUnauthenticated {
		status = http.StatusUnauthorized
	}
	http.Error(w, err.Message(), status)
}

func isLocalHost(hostport string) bool {
	host := hostport
	if h, _, err := net.SplitHostPort(hostport); err == nil {
		host = h
	}
	if host == "localhost" {
		return true
	}
	_, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return err == nil
}

// recovered turns a panic into an error of that call alone.
func (a *API) recovered(_ context.Context, s connect.Spec, _ http.Header, p any) error {
	a.metrics.panics.Inc()
	a.log.Error("api call panicked", "procedure", s.Procedure, logkey.Err, fmt.Sprint(p), "stack", string(debug.Stack()))
	return connect.NewError(connect.CodeInternal, errors.New("a fault in the dispatcher: its log holds the details"))
}
