package security_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/rara-run/rara/executors/go/internal/security"
)

// authority signs certificates; file is what others trust it by.
type authority struct {
	t      *testing.T
	folder string
	file   string
	cert   *x509.Certificate
	key    *ecdsa.PrivateKey
}

func newAuthority(t *testing.T, name string) *authority {
	t.Helper()
	a := &authority{t: t, folder: t.TempDir(), key: newKey(t)}
	a.file = filepath.Join(a.folder, name)
	der := a.sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, nil, a.key)
	a.cert, _ = x509.ParseCertificate(der)
	a.write(a.file, "CERTIFICATE", der)
	return a
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func (a *authority) sign(template, parent *x509.Certificate, key *ecdsa.PrivateKey) []byte {
	a.t.Helper()
	if parent == nil {
		parent = template
	}
	template.SerialNumber = big.NewInt(time.Now().UnixNano())
	if template.NotAfter.IsZero() {
		template.NotAfter = time.Now().Add(time.Hour)
	}
	template.NotBefore = template.NotAfter.Add(-24 * time.Hour)
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	return der
}

// pair writes a certificate and its key to the files, each in one move.
func (a *authority) pair(certificate, key string, change ...func(*x509.Certificate)) {
	a.t.Helper()
	template := &x509.Certificate{
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, one := range change {
		one(template)
	}
	own := newKey(a.t)
	der, err := x509.MarshalPKCS8PrivateKey(own)
	if err != nil {
		a.t.Fatal(err)
	}
	a.write(key, "PRIVATE KEY", der)
	a.write(certificate, "CERTIFICATE", a.sign(template, a.cert, own))
}

func (a *authority) write(file, kind string, der []byte) {
	a.t.Helper()
	write(a.t, file, string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})))
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := errors.Join(os.WriteFile(file+".new", []byte(text), 0o600), os.Rename(file+".new", file)); err != nil {
		t.Fatal(err)
	}
}

// serve a port with this door until the test ends.
func serve(t *testing.T, door security.Door) string {
	t.Helper()
	options, err := door.ServerOptions()
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(options...)
	grpc_health_v1.RegisterHealthServer(server, health.NewServer())
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return listener.Addr().String()
}

// ask opens a connection and lists what is served, which needs a token where one is asked for.
func ask(t *testing.T, address string, caller security.Caller) error {
	t.Helper()
	options, err := caller.DialOptions(address)
	if err != nil {
		t.Fatal(err)
	}
	connection, err := grpc.NewClient(address, options...)
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close()
	return list(t, connection)
}

func list(t *testing.T, connection *grpc.ClientConn) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_, err := grpc_health_v1.NewHealthClient(connection).List(ctx, &grpc_health_v1.HealthListRequest{})
	return err
}

func expect(t *testing.T, what string, err error, want codes.Code) {
	t.Helper()
	if got := status.Code(err); got != want {
		t.Errorf("%s: got %v, want %v", what, err, want)
	}
}

func TestOnlyANameSignedByATrustedAuthorityIsTalkedTo(t *testing.T) {
	t.Parallel()
	ours, other := newAuthority(t, "ours"), newAuthority(t, "other")
	certificate, key := filepath.Join(t.TempDir(), "cert"), filepath.Join(t.TempDir(), "key")
	ours.pair(certificate, key)
	address := serve(t, security.Door{Certificate: certificate, Key: key})
	trusting := security.Caller{CA: ours.file}

	expect(t, "right", ask(t, address, trusting), codes.OK)
	expect(t, "another authority", ask(t, address, security.Caller{CA: other.file}), codes.Unavailable)
	expect(t, "plain text", ask(t, address, security.Caller{}), codes.Unavailable)
	ours.pair(certificate, key, func(c *x509.Certificate) { c.IPAddresses, c.DNSNames = nil, []string{"elsewhere"} })
	expect(t, "another name", ask(t, address, trusting), codes.Unavailable)
	ours.pair(certificate, key, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) })
	expect(t, "expired", ask(t, address, trusting), codes.Unavailable)
}

func TestWithoutACertificateOfItsOwnNobodyIsLetIn(t *testing.T) {
	t.Parallel()
	ours, other := newAuthority(t, "ours"), newAuthority(t, "other")
	folder := t.TempDir()
	in := func(name string) string { return filepath.Join(folder, name) }
	ours.pair(in("server"), in("server.key"))
	ours.pair(in("client"), in("client.key"))
	other.pair(in("stranger"), in("stranger.key"))
	address := serve(t, security.Door{Certificate: in("server"), Key: in("server.key"), ClientCA: ours.file})

	expect(t, "its own", ask(t, address,
		security.Caller{CA: ours.file, Certificate: in("client"), Key: in("client.key")}), codes.OK)
	expect(t, "none", ask(t, address, security.Caller{CA: ours.file}), codes.Unavailable)
	expect(t, "a stranger's", ask(t, address,
		security.Caller{CA: ours.file, Certificate: in("stranger"), Key: in("stranger.key")}), codes.Unavailable)
}

func TestFilesThatChangeCountFromTheNextConnectionOn(t *testing.T) {
	t.Parallel()
	first, second := newAuthority(t, "first"), newAuthority(t, "second")
	folder := t.TempDir()
	certificate, key, trusted := filepath.Join(folder, "cert"), filepath.Join(folder, "key"), filepath.Join(folder, "ca")
	first.pair(certificate, key)
	address := serve(t, security.Door{Certificate: certificate, Key: key})
	text, err := os.ReadFile(first.file)
	if err != nil {
		t.Fatal(err)
	}
	write(t, trusted, string(text))
	lasting := security.Caller{CA: trusted}
	options, err := lasting.DialOptions(address)
	if err != nil {
		t.Fatal(err)
	}
	open, err := grpc.NewClient(address, options...)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	expect(t, "before", list(t, open), codes.OK)

	write(t, certificate, "half of a change")
	expect(t, "half of a change", ask(t, address, security.Caller{CA: first.file}), codes.OK)
	second.pair(certificate, key)
	expect(t, "new authority", ask(t, address, security.Caller{CA: second.file}), codes.OK)
	expect(t, "old authority", ask(t, address, security.Caller{CA: first.file}), codes.Unavailable)
	expect(t, "the open connection", list(t, open), codes.OK)

	text, err = os.ReadFile(second.file)
	if err != nil {
		t.Fatal(err)
	}
	write(t, trusted, string(text))
	again, err := grpc.NewClient(address, options...)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	expect(t, "a caller whose file has changed", list(t, again), codes.OK)
}

func TestACallWithoutATokenOfTheFileIsRefused(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	taken, shown := filepath.Join(folder, "taken"), filepath.Join(folder, "shown")
	write(t, taken, "new-secret\nold-secret\n")
	write(t, shown, "old-secret\n")
	address := serve(t, security.Door{TokenFile: taken})

	expect(t, "the one", ask(t, address, security.Caller{Token: "new-secret"}), codes.OK)
	expect(t, "the other, of a file", ask(t, address, security.Caller{TokenFile: shown}), codes.OK)
	err := ask(t, address, security.Caller{Token: "old-secre"})
	expect(t, "neither", err, codes.Unauthenticated)
	expect(t, "none", ask(t, address, security.Caller{}), codes.Unauthenticated)
	if info, ok := status.Convert(err).Details()[0].(*errdetails.ErrorInfo); !ok || info.Reason != "CREDENTIAL_INVALID" {
		t.Errorf("got %v", status.Convert(err).Details())
	}
	write(t, taken, "new-secret\n")
	expect(t, "no longer", ask(t, address, security.Caller{TokenFile: shown}), codes.Unauthenticated)
	write(t, shown, "new-secret\n")
	expect(t, "renewed", ask(t, address, security.Caller{TokenFile: shown}), codes.OK)
}

func TestWhatCannotBeIsRefusedByName(t *testing.T) {
	t.Parallel()
	for _, caller := range []security.Caller{
		{Token: "a-secret"},
		{TokenFile: "/nowhere", CA: security.System},
		{Token: "a", TokenFile: "b"},
		{CA: "/nowhere"},
		{CA: security.System, Certificate: "a"},
		{Certificate: "a", Key: "b"},
	} {
		if _, err := caller.DialOptions("10.1.2.3:7310"); err == nil {
			t.Errorf("%v was taken", caller)
		}
	}
	for _, door := range []security.Door{{Certificate: "a"}, {ClientCA: "a"}, {TokenFile: "/nowhere"}} {
		if _, err := door.ServerOptions(); err == nil {
			t.Errorf("%v was taken", door)
		}
	}
	for _, safe := range []security.Caller{{Token: "a", Insecure: true}, {Token: "a", CA: security.System}, {}} {
		if _, err := safe.DialOptions("10.1.2.3:7310"); err != nil {
			t.Errorf("%v: %v", safe, err)
		}
	}
}
