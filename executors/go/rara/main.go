package rara

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/rara-run/rara/executors/go/internal/readyfile"
)

// Exit codes of Main, as of the Python executor.
const (
	exitOK       = 0
	exitFailed   = 1
	exitUsage    = 2
	exitReplaced = 3
)

// Main is the body of a program that is an executor: it reads the environment and the command line, runs until a signal
// ends it, and exits. The first SIGTERM or SIGINT drains; the second one ends at once. setups are called first, and what
// they return at the end, in processes of operations with OwnProcess, too: rara.Main(registry, otlp.Setup) sends spans.
//
// With the argument `ready` the program is a health check instead, which needs no shell: it ends at once, with 0 while
// the executor beside it keeps the file of RARA_EXECUTOR_READY_FILE new.
func Main(registry *Registry, setups ...Setup) {
	if len(os.Args) == 2 && os.Args[1] == "ready" {
		os.Exit(checkReady(os.LookupEnv, os.Stderr))
	}
	ServeChild(registry, setups...)
	end, err := setUp(setups)
	if err != nil {
		fmt.Fprintf(os.Stderr, "rara-executor: %v\n", err)
		os.Exit(exitUsage)
	}
	code := run(registry, os.Args, os.LookupEnv, os.Stdout, os.Stderr)
	end()
	os.Exit(code)
}

const readyFile = "RARA_EXECUTOR_READY_FILE"

func checkReady(lookup func(string) (string, bool), errout io.Writer) int {
	switch path, _ := lookup(readyFile); {
	case path == "":
		fmt.Fprintln(errout, "rara-executor: "+readyFile+" names no file")
		return exitUsage
	case !readyfile.IsNew(path):
		fmt.Fprintln(errout, "rara-executor: not ready")
		return exitFailed
	}
	return exitOK
}

// Setup prepares something of the process. end, which is not nil, is given half a second.
type Setup func(ctx context.Context) (end func(context.Context) error, err error)

const lastWords = 500 * time.Millisecond

func setUp(setups []Setup) (end func(), err error) {
	var ends []func(context.Context) error
	for _, setup := range setups {
		one, err := setup(context.Background())
		if err != nil {
			return nil, err
		}
		ends = append(ends, one)
	}
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), lastWords)
		defer cancel()
		for _, one := range ends {
			_ = one(ctx) // the work has ended well: what was not sent is no reason to fail
		}
	}, nil
}

func run(
	registry *Registry, args []string, lookup func(string) (string, bool), out, errout io.Writer,
) int {
	options, err := FromEnvironment(lookup)
	if err == nil {
		err = parse(&options, args, errout)
	}
	if errors.Is(err, flag.ErrHelp) {
		return exitOK
	}
	os.Unsetenv("RARA_TOKEN") // the processes of handlers inherit what is left
	options.OnConnected = func() {
		fmt.Fprintf(out, "rara-executor %s connected to %s\n", options.Name, options.Scheduler)
	}
	options.OnListening = func(address string) {
		fmt.Fprintf(out, "rara-executor %s listening on %s\n", options.Name, address)
	}
	var executor *Executor
	if err == nil {
		executor, err = NewExecutor(registry, options)
	}
	if err != nil {
		fmt.Fprintf(errout, "rara-executor: %v\n", err)
		return exitUsage
	}
	ctx, stop := untilSignal(executor.engine.CutShort)
	defer stop()
	switch err := executor.Run(ctx); {
	case errors.Is(err, ErrReplaced):
		fmt.Fprintf(errout, "rara-executor: %v\n", err)
		return exitReplaced
	case err != nil:
		fmt.Fprintf(errout, "rara-executor: %v\n", err)
		return exitFailed
	}
	return exitOK
}

// untilSignal is done at the first signal; the second ends the process, after a last call of cutShort.
func untilSignal(cutShort func()) (context.Context, func()) {
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		for range signals {
			if ctx.Err() != nil {
				cutShort()
				os.Exit(exitFailed)
			}
			cancel()
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		close(signals)
		cancel()
	}
}

func parse(options *Options, args []string, errout io.Writer) error {
	flags := flag.NewFlagSet(args[0], flag.ContinueOnError)
	flags.SetOutput(errout)
	flags.StringVar(&options.Scheduler, "scheduler", options.Scheduler, "where the scheduler listens, `host:port`")
	flags.StringVar(&options.Listen, "listen", options.Listen, "be dialled by schedulers instead, at `host:port`")
	flags.StringVar(&options.Name, "name", options.Name, "the `label` people know this executor by")
	flags.IntVar(&options.Slots, "slots", options.Slots, "jobs at once")
	flags.StringVar(&options.Dir, "dir", options.Dir, "`folder` for scratch and cache")
	flags.Func("label", "`key=value`, repeatable", func(value string) error {
		var more map[string]string
		if err := asLabels(&more)(value); err != nil {
			return err
		}
		if options.Labels == nil {
			options.Labels = map[string]string{}
		}
		for key, label := range more {
			options.Labels[key] = label
		}
		return nil
	})
	flags.Func("stop-s", "`seconds` from SIGTERM to the end", asSeconds(&options.Stop))
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	return nil
}
