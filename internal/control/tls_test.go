package control

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	millracev1 "github.com/millrace/millrace/proto/millrace/v1"
)

// certificates makes a CA and one certificate of it for both sides.
func certificates(t *testing.T) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "millrace test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage:    x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(leaf)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

func TestMutualTLS(t *testing.T) {
	t.Parallel()
	cert, pool := certificates(t)
	s := startServer(t, newRecorder(), func(c *ServerConfig) {
		c.QueueBytes = 64 << 10
		c.TLS = &tls.Config{
			MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert},
			ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert,
		}
	})
	good := startClient(t, func(c *ClientConfig) {
		c.TLS = &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pool, Certificates: []tls.Certificate{cert}}
	})
	bare := startClient(t, func(c *ClientConfig) {
		c.WorkerID = "w-bare"
		c.TLS = &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: pool}
	})
	plain := startClient(t, func(c *ClientConfig) { c.WorkerID = "w-plain" })
	for _, c := range []*testClient{good, bare, plain} {
		c.SetTargets(map[string]string{"d-1": s.addr})
	}
	await(t, good.events, "connected", "d-1")
	s.Send("w-1", &millracev1.ControlCancel{TaskId: "t", Attempt: 1})
	await(t, good.events, "cancel", "d-1")
	if good.SendHungry(t.Context(), []string{"default"}, 1) != 1 {
		t.Error("not acked")
	}
	awaitThat(t, "the others were refused", func() bool {
		return metric(t, s.reg, "handshakes_refused_total") >= 2
	})
	if ws := s.Workers(); len(ws) != 1 {
		t.Errorf("workers: %+v", ws)
	}

	// Dropping a peer that does not read must not block either: closing TLS would try to say goodbye to it first.
	deaf := tls.Client(dialRaw(t, s.addr).nc, &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: pool, Certificates: []tls.Certificate{cert}, ServerName: "127.0.0.1",
	})
	r := &raw{t: t, nc: deaf, fr: newFrameReader(deaf, MaxFrame)}
	r.hello("w-deaf", nil)
	r.recv(&millracev1.ControlWelcome{})
	filler := &millracev1.ControlDrain{Reason: strings.Repeat("x", 32<<10)}
	for sent := true; sent; {
		start := time.Now()
		sent = s.Send("w-deaf", filler)
		if d := time.Since(start); d > 2*time.Second {
			t.Fatalf("Send blocked for %v", d)
		}
	}
}
