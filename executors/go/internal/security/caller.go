package security

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// Caller is what an executor shows to a scheduler, and what it trusts. Its zero value is plain text without a token.
type Caller struct {
	Token, TokenFile string // at most one of them
	CA               string // a file with authorities, or System; empty: plain text
	Certificate, Key string
	Insecure         bool // a token may leave this machine in plain text
	Tell             func(message string, err error)
}

// DialOptions for the target. The error names the settings.
func (c Caller) DialOptions(target string) ([]grpc.DialOption, error) {
	isExposed := c.CA == "" && !IsLoopback(target)
	switch {
	case c.Token != "" && c.TokenFile != "":
		return nil, errors.New("RARA_TOKEN and RARA_TOKEN_FILE are both set: one of them is enough")
	case (c.Certificate == "") != (c.Key == ""):
		return nil, errors.New("RARA_TLS_CLIENT_CERT and RARA_TLS_CLIENT_KEY go together")
	case c.Certificate != "" && c.CA == "":
		return nil, errors.New("RARA_TLS_CLIENT_CERT needs RARA_TLS_CA: a file, or `system`")
	case (c.Token != "" || c.TokenFile != "") && isExposed && !c.Insecure:
		return nil, fmt.Errorf(
			"a token for %s needs TLS: set RARA_TLS_CA, or RARA_INSECURE=1 to send it in plain text", target)
	}
	transport, err := c.transport()
	if err != nil {
		return nil, err
	}
	options := []grpc.DialOption{grpc.WithTransportCredentials(transport)}
	source, err := c.token()
	if err != nil {
		return nil, err
	}
	if source != nil {
		options = append(options, grpc.WithPerRPCCredentials(bearer{source, c.CA != ""}))
	}
	return options, nil
}

func (c Caller) transport() (credentials.TransportCredentials, error) {
	if c.CA == "" {
		return insecure.NewCredentials(), nil
	}
	config, err := watch(func() (*tls.Config, error) {
		pool, err := authorities(c.CA)
		if err != nil {
			return nil, err
		}
		own, err := pair(c.Certificate, c.Key)
		return &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool, Certificates: own}, err
	}, told(c.Tell), c.CA, c.Certificate, c.Key)
	if err != nil {
		return nil, err
	}
	return &renewed{credentials.NewTLS(config.get()), config}, nil
}

func (c Caller) token() (func() string, error) {
	if c.TokenFile == "" {
		if c.Token == "" {
			return nil, nil
		}
		return func() string { return c.Token }, nil
	}
	file, err := watch(func() ([]string, error) { return tokens(c.TokenFile) }, told(c.Tell), c.TokenFile)
	if err != nil {
		return nil, err
	}
	return func() string { return file.get()[0] }, nil
}

// told says what became of a change.
func told(tell func(string, error)) func(error) {
	return func(err error) {
		switch {
		case tell == nil:
		case err != nil:
			tell("certificates.not_reloaded", err)
		default:
			tell("certificates.reloaded", nil)
		}
	}
}

// renewed makes each handshake with what the files say then.
type renewed struct {
	credentials.TransportCredentials
	config *watched[*tls.Config]
}

func (r *renewed) ClientHandshake(
	ctx context.Context, authority string, raw net.Conn,
) (net.Conn, credentials.AuthInfo, error) {
	return credentials.NewTLS(r.config.get()).ClientHandshake(ctx, authority, raw)
}

func (r *renewed) Clone() credentials.TransportCredentials {
	return &renewed{r.TransportCredentials.Clone(), r.config}
}

// bearer adds the token to each call.
type bearer struct {
	token    func() string
	needsTLS bool
}

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + b.token()}, nil
}

func (b bearer) RequireTransportSecurity() bool { return b.needsTLS }

// IsLoopback tells whether the address stays on this machine.
func IsLoopback(target string) bool {
	if strings.HasPrefix(target, "unix:") {
		return true
	}
	host, _, err := net.SplitHostPort(target)
	if err != nil {
		host = target
	}
	return host == "localhost" || net.ParseIP(host).IsLoopback()
}
