package rara_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/rara-run/rara/executors/go/rara"
)

func environment(values map[string]string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		value, ok := values[name]
		return value, ok
	}
}

func TestSettingsAreThoseOfThePythonExecutor(t *testing.T) {
	t.Parallel()
	options, err := rara.FromEnvironment(environment(map[string]string{
		"RARA_SCHEDULER": "host:1", "RARA_EXECUTOR_NAME": "n", "RARA_EXECUTOR_KIND": "go-gpu",
		"RARA_EXECUTOR_LABELS": "gpu=a100, zone = b ,", "RARA_EXECUTOR_SLOTS": "7", "RARA_EXECUTOR_GRACE_S": "0.5",
		"RARA_EXECUTOR_STOP_S": "3", "RARA_EXECUTOR_DIR": "/d", "RARA_EXECUTOR_CACHE_BYTES": "99999999999",
		"RARA_EXECUTOR_TRANSFERS": "2", "RARA_EXECUTOR_SECRETS_DIR": "/s", "RARA_LOG_FORMAT": "console",
		"RARA_LOG_LEVEL": "error",
	}))
	if err != nil {
		t.Fatal(err)
	}
	if options.Scheduler != "host:1" || options.Name != "n" || options.Kind != "go-gpu" || options.Slots != 7 ||
		options.Labels["gpu"] != "a100" || options.Labels["zone"] != "b" || len(options.Labels) != 2 ||
		options.Grace != 500*time.Millisecond || options.Stop != 3*time.Second || options.Dir != "/d" ||
		options.CacheBytes != 99999999999 || options.Transfers != 2 || options.SecretsDir != "/s" ||
		options.Logger.Enabled(t.Context(), 0) {
		t.Errorf("got %+v", options)
	}
}

func TestAllThatIsWrongIsNamedAtOnce(t *testing.T) {
	t.Parallel()
	_, err := rara.FromEnvironment(environment(map[string]string{
		"RARA_EXECUTOR_SLOTS": "many", "RARA_EXECUTOR_LABELS": "gpu", "RARA_EXECUTOR_STOP_S": "-1", "RARA_LOG_LEVEL": "loud",
	}))
	for _, name := range []string{"RARA_EXECUTOR_SLOTS", "RARA_EXECUTOR_LABELS", "RARA_EXECUTOR_STOP_S", "RARA_LOG_LEVEL"} {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s is not in %v", name, err)
		}
	}
	nothing := func(context.Context, *rara.Job[any]) (any, error) { return nil, nil }
	registry := rara.NewRegistry()
	rara.Register(registry, "bad kind", "1.0.0", nothing)
	rara.Register(registry, "k", "not a version", nothing)
	rara.Register(registry, "k", "1.0.0", nothing, rara.MaxConcurrency(-1))
	rara.Register(registry, "k", "1.0.0", nothing)
	rara.Register[any, any](registry, "none", "1.0.0", nil)
	options := rara.DefaultOptions()
	options.Transfers, options.Kind, options.Stop = 0, "", 0
	_, err = rara.NewExecutor(registry, options)
	for _, part := range []string{"bad kind", "not a version", "negative", "twice", "no handler", "Transfers", "Kind", "Stop"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%s is not in %v", part, err)
		}
	}
	if _, err := rara.NewExecutor(rara.NewRegistry(), rara.DefaultOptions()); err == nil {
		t.Error("an empty registry offers nothing")
	}
}
