// Package otlp sends the spans of an executor and its handlers by OTLP over gRPC. Programs that do not import it carry
// none of it.
package otlp

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	"go.opentelemetry.io/otel/sdk/trace"

	"github.com/rara-run/rara/executors/go/internal/logs"
)

const sayAgain = 5 * time.Minute

// Setup makes OpenTelemetry's global tracer provider one that sends, if its variables name an endpoint:
// OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT; otherwise it does nothing. OTEL_TRACES_SAMPLER and
// the rest hold as well. Spans that do not fit into the bounded queue are dropped, so a receiver that is away holds
// nobody up. end sends what is left. Hand it to rara.Main.
func Setup(ctx context.Context) (end func(context.Context) error, err error) {
	wanted, err := isWanted()
	if !wanted || err != nil {
		return func(context.Context) error { return nil }, err
	}
	exporter, err := otlptracegrpc.New(ctx)
	if err != nil {
		return nil, fmt.Errorf("OTLP: %w", err)
	}
	about, err := resource.New(ctx,
		resource.WithAttributes(attribute.String("service.name", "rara-executor")), resource.WithFromEnv())
	if err != nil {
		return nil, fmt.Errorf("OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	provider := trace.NewTracerProvider(trace.WithBatcher(exporter), trace.WithResource(about))
	otel.SetTracerProvider(provider)
	otel.SetTextMapPropagator(propagation.TraceContext{})
	otel.SetErrorHandler(&complaints{format: cmp.Or(os.Getenv("RARA_LOG_FORMAT"), "auto")})
	return provider.Shutdown, nil
}

func isWanted() (bool, error) {
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") {
		return false, nil
	}
	if os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") == "" && os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") == "" {
		return false, nil
	}
	if exporter := os.Getenv("OTEL_TRACES_EXPORTER"); exporter != "" && exporter != "otlp" {
		return false, nil
	}
	for _, name := range []string{"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"} {
		if protocol := os.Getenv(name); protocol != "" {
			if protocol != "grpc" {
				return false, fmt.Errorf("%s=%s is not spoken here: only grpc is", name, protocol)
			}
			break
		}
	}
	return true, nil
}

// complaints are told once in a while: a receiver that is away is no reason to shout.
type complaints struct {
	format string
	mu     sync.Mutex
	last   time.Time
	unsaid int
}

func (c *complaints) Handle(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.last.IsZero() && time.Since(c.last) < sayAgain {
		c.unsaid++
		return
	}
	logs.New(os.Stderr, c.format, "warning").Warn("telemetry.export_failed", "error", err.Error(), "unsaid", c.unsaid)
	c.last, c.unsaid = time.Now(), 0
}
