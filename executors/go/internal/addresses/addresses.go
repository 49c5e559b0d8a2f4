// Package addresses makes gRPC know `ipv4:HOST:PORT,HOST:PORT`, several schedulers in order of preference, as it does in
// other languages.
package addresses

import (
	"fmt"
	"net/netip"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/resolver"
)

// Known is the option of a connection that may be given such a target.
func Known() grpc.DialOption { return grpc.WithResolvers(builder{}) }

type builder struct{}

// Scheme is the resolver's interface, as are the next.
func (builder) Scheme() string { return "ipv4" }

func (builder) Build(
	target resolver.Target, connection resolver.ClientConn, _ resolver.BuildOptions,
) (resolver.Resolver, error) {
	var state resolver.State
	for address := range strings.SplitSeq(target.Endpoint(), ",") {
		if _, err := netip.ParseAddrPort(address); err != nil {
			return nil, fmt.Errorf("scheduler %q: %w", address, err)
		}
		state.Endpoints = append(state.Endpoints,
			resolver.Endpoint{Addresses: []resolver.Address{{Addr: address}}})
	}
	return fixed{}, connection.UpdateState(state)
}

// fixed has nothing to look up again.
type fixed struct{}

func (fixed) ResolveNow(resolver.ResolveNowOptions) {}

func (fixed) Close() {}
