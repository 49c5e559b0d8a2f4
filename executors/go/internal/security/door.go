package security

import (
	"context"
	"crypto/subtle"
	"crypto/tls"
	"errors"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/rara-run/rara/executors/go/internal/codes"
)

// what probes ask: it needs no token.
const healthCheck = "/grpc.health.v1.Health/Check"

// Door is who may dial an executor. Its zero value is plain text, open to all.
type Door struct {
	Certificate, Key string
	ClientCA         string // callers must show a certificate of these authorities
	TokenFile        string // callers must show a token of this file, one a line
	Tell             func(message string, err error)
}

// IsClosed tells whether TLS is spoken, and not everybody let in.
func (d Door) IsClosed() bool {
	return d.Certificate != "" && (d.ClientCA != "" || d.TokenFile != "")
}

// ServerOptions of the port. The error names the settings.
func (d Door) ServerOptions() ([]grpc.ServerOption, error) {
	switch {
	case (d.Certificate == "") != (d.Key == ""):
		return nil, errors.New("RARA_TLS_CERT and RARA_TLS_KEY go together")
	case d.ClientCA != "" && d.Certificate == "":
		return nil, errors.New("RARA_TLS_CLIENT_CA needs RARA_TLS_CERT")
	}
	var options []grpc.ServerOption
	if d.Certificate != "" {
		config, err := watch(d.read, told(d.Tell), d.Certificate, d.Key, d.ClientCA)
		if err != nil {
			return nil, err
		}
		options = append(options, grpc.Creds(credentials.NewTLS(&tls.Config{
			MinVersion:         tls.VersionTLS12,
			GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return config.get(), nil },
		})))
	}
	if d.TokenFile != "" {
		file, err := watch(func() ([]string, error) { return tokens(d.TokenFile) }, told(d.Tell), d.TokenFile)
		if err != nil {
			return nil, err
		}
		keeper := doorkeeper{file.get}
		options = append(options, grpc.ChainUnaryInterceptor(keeper.unary), grpc.ChainStreamInterceptor(keeper.stream))
	}
	return options, nil
}

func (d Door) read() (*tls.Config, error) {
	own, err := pair(d.Certificate, d.Key)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12, Certificates: own, NextProtos: []string{"h2"}}
	if d.ClientCA != "" {
		config.ClientAuth = tls.RequireAndVerifyClientCert
		config.ClientCAs, err = authorities(d.ClientCA)
	}
	return config, err
}

type doorkeeper struct{ tokens func() []string }

func (k doorkeeper) unary(
	ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
) (any, error) {
	if err := k.check(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	return handler(ctx, request)
}

func (k doorkeeper) stream(
	service any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler,
) error {
	if err := k.check(stream.Context(), info.FullMethod); err != nil {
		return err
	}
	return handler(service, stream)
}

// check compares with each token in constant time, so that the time tells nothing about any.
func (k doorkeeper) check(ctx context.Context, method string) error {
	if method == healthCheck {
		return nil
	}
	shown := metadata.ValueFromIncomingContext(ctx, "authorization")
	found := 0
	if len(shown) == 1 {
		for _, token := range k.tokens() {
			found |= subtle.ConstantTimeCompare([]byte(shown[0]), []byte("Bearer "+token))
		}
	}
	if found == 1 {
		return nil
	}
	answer := status.New(grpccodes.Unauthenticated, "the call carries no token of RARA_DIRECT_TOKEN_FILE")
	if detailed, err := answer.WithDetails(
		&errdetails.ErrorInfo{Reason: codes.CredentialInvalid, Domain: "rara.v1"}); err == nil {
		answer = detailed
	}
	return answer.Err()
}
