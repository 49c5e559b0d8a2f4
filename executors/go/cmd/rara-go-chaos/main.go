// Command rara-go-chaos is an executor for tests under faults: the operations of the chaos runner's load, as its Python
// executors offer them too, some that do not end when they are asked to, and some that say where they run.
package main

import (
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
	rara.Main(registry)
}
