// Command rara-go-executor runs steps of the knowledge pipeline in Go: `clean.dedupe`, also under the name that the
// pipeline asks for, `corpus.clean`, and `hash.manifest`.
//
//	RARA_SCHEDULER=127.0.0.1:7310 rara-go-executor
package main

import (
	"github.com/rara-run/rara/executors/go/internal/manifest"
	"github.com/rara-run/rara/executors/go/internal/passages"
	"github.com/rara-run/rara/executors/go/otlp"
	"github.com/rara-run/rara/executors/go/rara"
)

func main() {
	registry := rara.NewRegistry()
	rara.Register(registry, "clean.dedupe", "1.0.0", passages.Clean)
	rara.Register(registry, "corpus.clean", "1.0.0", passages.Clean)
	rara.Register(registry, "hash.manifest", "1.0.0", manifest.Hash)
	rara.Main(registry, otlp.Setup)
}
