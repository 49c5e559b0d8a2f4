// Command rara-go-chaos is an executor for tests under faults: the operations of the chaos runner's load, as its Python
// executors offer them too, some that do not end when they are asked to, and some that say where they run.
package main

import (
	"os"
	"strings"

	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"github.com/rara-run/rara/executors/go/internal/chaos"
	"github.com/rara-run/rara/executors/go/internal/stubborn"
	"github.com/rara-run/rara/executors/go/internal/where"
	"github.com/rara-run/rara/executors/go/rara"
)

func main() {
	registry := rara.NewRegistry()
	chaos.Register(registry)
	stubborn.Register(registry)
	where.Register(registry)
	knowAddresses(os.Getenv("RARA_SCHEDULER"))
	rara.Main(registry)
}

// knowAddresses makes gRPC know `ipv4:HOST:PORT,HOST:PORT`, several schedulers in order of preference, which it does in
// other languages.
func knowAddresses(target string) {
	const scheme = "ipv4"
	list, isList := strings.CutPrefix(target, scheme+":")
	if !isList {
		return
	}
	var state resolver.State
	for address := range strings.SplitSeq(list, ",") {
		state.Endpoints = append(state.Endpoints,
			resolver.Endpoint{Addresses: []resolver.Address{{Addr: address}}})
	}
	builder := manual.NewBuilderWithScheme(scheme)
	builder.InitialState(state)
	resolver.Register(builder)
}
