// Command rara-go-probe is an executor of the probe operations, for `rara executor verify` and for tests.
package main

import (
	"github.com/rara-run/rara/executors/go/internal/fenced"
	"github.com/rara-run/rara/executors/go/internal/probes"
	"github.com/rara-run/rara/executors/go/otlp"
	"github.com/rara-run/rara/executors/go/rara"
)

func main() {
	registry := rara.NewRegistry()
	probes.Register(registry)
	fenced.Register(registry)
	probes.RegisterBulk(registry)
	rara.Main(registry, otlp.Setup)
}
