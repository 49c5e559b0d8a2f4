package rara

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"sort"

	"github.com/rara-run/rara/executors/go/internal/child"
	"github.com/rara-run/rara/executors/go/internal/codes"
	"github.com/rara-run/rara/executors/go/internal/engine"
)

var (
	kindShape    = regexp.MustCompile(`^[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?$`)
	versionShape = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z.+-]{0,62}$`)
)

// Handler runs one job. In and Out are whatever encoding/json can turn from and into JSON; json.RawMessage takes an
// input as it is. When ctx is done the handler is to return soon: CancelReason tells why.
type Handler[In, Out any] func(ctx context.Context, job *Job[In]) (Out, error)

// Registry is the operations that an executor offers, each under a kind and a version.
type Registry struct {
	operations map[[2]string]engine.Operation
	handlers   map[[2]string]engine.Handler // as they were given, whichever process runs them
	problems   []error
}

// NewRegistry offers nothing yet.
func NewRegistry() *Registry {
	return &Registry{operations: map[[2]string]engine.Operation{}, handlers: map[[2]string]engine.Handler{}}
}

// Option changes how an operation is run.
type Option func(*engine.Operation) error

// MaxConcurrency bounds how many jobs of the operation run at once on one executor. 0: as many as there are slots.
func MaxConcurrency(jobs int) Option {
	return func(operation *engine.Operation) error {
		if jobs < 0 {
			return errors.New("MaxConcurrency is negative")
		}
		operation.MaxConcurrency = jobs
		return nil
	}
}

// OwnProcess runs each job of the operation in a process of its own: this program again, of which Main or ServeChild
// must then be the first call. Such a handler can be ended, with its process group, when it does not stop, and
// what brings its process down costs nobody else. A job costs the start of a process.
func OwnProcess() Option {
	return func(operation *engine.Operation) error {
		operation.Handler = child.Run
		return nil
	}
}

// ServeChild runs the job and exits, if this process was started for one, and does nothing else. Programs that do not
// call Main and have operations with OwnProcess call it first. setups are as for Main.
func ServeChild(registry *Registry, setups ...Setup) {
	if !child.IsChild() {
		return
	}
	options, _ := FromEnvironment(os.LookupEnv) // the executor itself has refused what is wrong
	end, err := setUp(setups)
	if err != nil {
		fmt.Fprintf(os.Stderr, "rara: child: %v\n", err)
		os.Exit(exitFailed)
	}
	err = child.Serve(func(kind, version string) engine.Handler {
		return registry.handlers[[2]string{kind, version}]
	}, options.Logger, end)
	if err != nil {
		fmt.Fprintf(os.Stderr, "rara: child: %v\n", err)
		os.Exit(exitFailed)
	}
	os.Exit(exitOK)
}

// Register offers the handler under a kind and a version. What cannot be registered is reported by NewExecutor, all at
// once.
func Register[In, Out any](registry *Registry, kind, version string, handler Handler[In, Out], options ...Option) {
	operation := engine.Operation{Kind: kind, Version: version, Handler: untyped(handler)}
	problem := func(format string, args ...any) {
		registry.problems = append(registry.problems,
			fmt.Errorf("operation %s %s: %w", kind, version, fmt.Errorf(format, args...)))
	}
	if !kindShape.MatchString(kind) {
		problem("a kind has letters, digits, dots, dashes and underscores")
	}
	if !versionShape.MatchString(version) {
		problem("it is not a version like 1.2.0")
	}
	if handler == nil {
		problem("it has no handler")
	}
	for _, option := range options {
		if err := option(&operation); err != nil {
			problem("%w", err)
		}
	}
	if _, taken := registry.operations[[2]string{kind, version}]; taken {
		problem("it is registered twice")
	}
	registry.operations[[2]string{kind, version}] = operation
	registry.handlers[[2]string{kind, version}] = untyped(handler)
}

// all operations, by kind and version.
func (r *Registry) all() ([]engine.Operation, error) {
	problems := r.problems
	if len(r.operations) == 0 {
		problems = append(problems, errors.New("the registry is empty: there would be nothing to run"))
	}
	var operations []engine.Operation
	for _, operation := range r.operations {
		operations = append(operations, operation)
	}
	sort.Slice(operations, func(i, j int) bool {
		a, b := operations[i], operations[j]
		return a.Kind < b.Kind || (a.Kind == b.Kind && a.Version < b.Version)
	})
	return operations, errors.Join(problems...)
}

func untyped[In, Out any](handler Handler[In, Out]) engine.Handler {
	return func(ctx context.Context, held *engine.Work) ([]byte, *engine.Failed) {
		job := &Job[In]{AnyJob: newAnyJob(held)}
		if err := decode(held.Request.Input.GetData(), &job.Input); err != nil {
			return nil, &engine.Failed{Code: codes.InputInvalid, Message: "input " + err.Error()}
		}
		output, err := handler(ctx, job)
		if err != nil {
			return nil, failed(err, held.MaxPayloadBytes)
		}
		return encoded(output, held.MaxPayloadBytes)
	}
}

// decode takes JSON in. No input is null.
func decode(data []byte, into any) error {
	if len(data) == 0 {
		data = []byte("null")
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.UseNumber() // a number in an `any` keeps all its digits
	err := decoder.Decode(into)
	var wrong *json.UnmarshalTypeError
	switch {
	case errors.As(err, &wrong):
		return fmt.Errorf("at /%s: a JSON %s does not fit into a %s",
			bytes.ReplaceAll([]byte(wrong.Field), []byte("."), []byte("/")), wrong.Value, wrong.Type)
	case err != nil:
		return fmt.Errorf("at /: %w", err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return errors.New("at /: more than one JSON value")
	}
	return nil
}
