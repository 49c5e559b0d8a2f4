package rara

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"

	"github.com/rara-run/rara/executors/go/internal/addresses"
	"github.com/rara-run/rara/executors/go/internal/logs"
	"github.com/rara-run/rara/executors/go/internal/security"
)

// Options of an executor. NewExecutor checks them as a whole. The names in brackets are those of FromEnvironment, which
// are the Python executor's too.
type Options struct {
	// Scheduler is host:port, several as ipv4:HOST:PORT,HOST:PORT, or any target that gRPC knows. [RARA_SCHEDULER]
	Scheduler string
	// Name is the label that people know, of at most 64 characters. [RARA_EXECUTOR_NAME]
	Name string
	// Kind is what a definition's executor_kind is compared with. [RARA_EXECUTOR_KIND]
	Kind string
	// Labels are what a definition's required_labels are matched with. [RARA_EXECUTOR_LABELS, as k=v,...]
	Labels map[string]string
	// Slots are jobs at once. [RARA_EXECUTOR_SLOTS]
	Slots int
	// Grace between asking a handler to stop and giving it up, where the scheduler does not say. [RARA_EXECUTOR_GRACE_S]
	Grace time.Duration
	// Stop bounds the time from the stop of Run to its end, last words included. [RARA_EXECUTOR_STOP_S]
	Stop time.Duration
	// Dir has scratch folders and the cache of input artifacts; executors of one machine may share it.
	// [RARA_EXECUTOR_DIR]
	Dir string
	// CacheBytes is the size to which the cache is kept. [RARA_EXECUTOR_CACHE_BYTES]
	CacheBytes int64
	// Transfers are artifacts moved at once. [RARA_EXECUTOR_TRANSFERS]
	Transfers int
	// TransferPatience is how long a transfer may move nothing, as while the scheduler is away or a disk is full, before
	// it is given up. [RARA_EXECUTOR_TRANSFER_PATIENCE_S]
	TransferPatience time.Duration
	// SecretsDir is where the secret provider `file` looks. [RARA_EXECUTOR_SECRETS_DIR]
	SecretsDir string
	// ReadyFile is there, and touched every second, while jobs can come; for health checks, such as the command `ready`
	// of Main. [RARA_EXECUTOR_READY_FILE]
	ReadyFile string
	// Logger gets what the executor and its handlers log, without secrets.
	// [RARA_LOG_FORMAT auto, json or console, RARA_LOG_LEVEL debug, info, warning or error]
	Logger *slog.Logger
	// TracerProvider makes the spans of handlers, in whose context they are current; nil: OpenTelemetry's global one.
	TracerProvider trace.TracerProvider
	// DialOptions are added to the connection's.
	DialOptions []grpc.DialOption
	// Token is the bearer token that the scheduler is shown; no handler gets to see it. [RARA_TOKEN]
	Token string
	// TokenFile has that token, and is read again when it changes. [RARA_TOKEN_FILE]
	TokenFile string
	// TLSCA makes it dial by TLS, and trust these authorities: a PEM file, or "system". [RARA_TLS_CA]
	TLSCA string
	// TLSClientCert and TLSClientKey are shown to a scheduler that asks for a certificate: PEM files, read again when
	// they change. [RARA_TLS_CLIENT_CERT, RARA_TLS_CLIENT_KEY]
	TLSClientCert, TLSClientKey string
	// TLSCert and TLSKey serve Listen by TLS: PEM files, read again when they change. [RARA_TLS_CERT, RARA_TLS_KEY]
	TLSCert, TLSKey string
	// TLSClientCA lets in only schedulers that show a certificate of these authorities. [RARA_TLS_CLIENT_CA]
	TLSClientCA string
	// DirectTokenFile lets in only schedulers that show a token of this file, one a line. [RARA_DIRECT_TOKEN_FILE]
	DirectTokenFile string
	// Listen is host:port to serve ExecutorService on: then schedulers dial this executor, whose address their
	// RARA_DIRECT_EXECUTORS names, and it dials Scheduler for artifacts alone. Empty: it dials. [RARA_EXECUTOR_LISTEN]
	Listen string
	// Insecure allows Listen beyond loopback in plain text or open to all, where whoever reaches it may run anything,
	// and a token in plain text. [RARA_INSECURE]
	Insecure bool
	// OnConnected is called once, when the first session has begun, or a scheduler has asked for the first time.
	OnConnected func()
	// OnListening is called when the port of Listen is open.
	OnListening func(address string)
}

// DefaultOptions are those of an executor without any setting.
func DefaultOptions() Options {
	name, err := os.Hostname()
	if err != nil || name == "" {
		name = "go-executor"
	}
	return Options{
		Scheduler:        "127.0.0.1:7310",
		Name:             name,
		Kind:             "go",
		Slots:            4,
		Grace:            10 * time.Second,
		Stop:             10 * time.Second,
		Dir:              filepath.Join(os.TempDir(), "rara-executor-"+strconv.Itoa(os.Getuid())),
		CacheBytes:       10 << 30,
		Transfers:        4,
		TransferPatience: 5 * time.Minute,
		SecretsDir:       "/run/secrets",
		Logger:           logs.New(os.Stderr, "auto", "info"),
	}
}

// FromEnvironment is DefaultOptions with the settings that lookup knows, such as os.LookupEnv.
func FromEnvironment(lookup func(string) (string, bool)) (Options, error) {
	o := DefaultOptions()
	format, level := "auto", "info"
	var problems []error
	set := func(name string, parse func(string) error) {
		if value, ok := lookup(name); ok {
			if err := parse(value); err != nil {
				problems = append(problems, fmt.Errorf("%s: %w", name, err))
			}
		}
	}
	set("RARA_SCHEDULER", asText(&o.Scheduler))
	set("RARA_EXECUTOR_LISTEN", asText(&o.Listen))
	set("RARA_INSECURE", asBool(&o.Insecure))
	set("RARA_TOKEN", asText(&o.Token))
	set("RARA_TOKEN_FILE", asText(&o.TokenFile))
	set("RARA_TLS_CA", asText(&o.TLSCA))
	set("RARA_TLS_CLIENT_CERT", asText(&o.TLSClientCert))
	set("RARA_TLS_CLIENT_KEY", asText(&o.TLSClientKey))
	set("RARA_TLS_CERT", asText(&o.TLSCert))
	set("RARA_TLS_KEY", asText(&o.TLSKey))
	set("RARA_TLS_CLIENT_CA", asText(&o.TLSClientCA))
	set("RARA_DIRECT_TOKEN_FILE", asText(&o.DirectTokenFile))
	set("RARA_EXECUTOR_NAME", asText(&o.Name))
	set("RARA_EXECUTOR_KIND", asText(&o.Kind))
	set("RARA_EXECUTOR_LABELS", asLabels(&o.Labels))
	set("RARA_EXECUTOR_SLOTS", asNumber(&o.Slots))
	set("RARA_EXECUTOR_GRACE_S", asSeconds(&o.Grace))
	set("RARA_EXECUTOR_STOP_S", asSeconds(&o.Stop))
	set("RARA_EXECUTOR_DIR", asText(&o.Dir))
	set("RARA_EXECUTOR_CACHE_BYTES", asNumber(&o.CacheBytes))
	set("RARA_EXECUTOR_TRANSFERS", asNumber(&o.Transfers))
	set("RARA_EXECUTOR_TRANSFER_PATIENCE_S", asSeconds(&o.TransferPatience))
	set("RARA_EXECUTOR_SECRETS_DIR", asText(&o.SecretsDir))
	set(readyFile, asText(&o.ReadyFile))
	set("RARA_LOG_FORMAT", asOneOf(&format, "auto", "json", "console"))
	set("RARA_LOG_LEVEL", asOneOf(&level, "debug", "info", "warning", "error"))
	o.Logger = logs.New(os.Stderr, format, level)
	return o, errors.Join(problems...)
}

// check names all that is wrong.
func (o *Options) check() error {
	var problems []error
	refuse := func(isWrong bool, name, format string, args ...any) {
		if isWrong {
			problems = append(problems, fmt.Errorf("option %s %s", name, fmt.Sprintf(format, args...)))
		}
	}
	refuse(o.Scheduler == "", "Scheduler", "is empty")
	for _, label := range []struct{ name, value string }{{"Name", o.Name}, {"Kind", o.Kind}} {
		refuse(label.value == "" || utf8.RuneCountInString(label.value) > 64 || !utf8.ValidString(label.value),
			label.name, "has 1 to 64 characters, not %q", label.value)
	}
	for key, value := range o.Labels {
		refuse(key == "" || !utf8.ValidString(key+value), "Labels", "has %q=%q", key, value)
	}
	refuse(o.Slots < 1 || o.Slots > 100_000, "Slots", "is %d, not 1 to 100000", o.Slots)
	refuse(o.Grace < 0, "Grace", "is negative")
	refuse(o.Stop <= 0, "Stop", "is %v, and must be above 0", o.Stop)
	refuse(o.Dir == "", "Dir", "is empty")
	refuse(o.CacheBytes < 0, "CacheBytes", "is negative")
	refuse(o.TransferPatience < 0, "TransferPatience", "is negative")
	refuse(o.Transfers < 1, "Transfers", "is %d, and must be at least 1", o.Transfers)
	host, _, err := net.SplitHostPort(o.Listen)
	refuse(o.Listen != "" && (err != nil || host == ""), "Listen", "is %q, not HOST:PORT", o.Listen)
	refuse(o.Listen != "" && !security.IsLoopback(o.Listen) && !o.Insecure && !o.door().IsClosed(), "Listen",
		"%s is beyond loopback, and whoever reaches it may run anything: set TLSCert, with TLSClientCA or DirectTokenFile, "+
			"or Insecure (RARA_INSECURE=1) to do it all the same", o.Listen)
	return errors.Join(problems...)
}

func (o *Options) dialOptions() ([]grpc.DialOption, error) {
	caller := security.Caller{Token: o.Token, TokenFile: o.TokenFile, CA: o.TLSCA, Certificate: o.TLSClientCert,
		Key: o.TLSClientKey, Insecure: o.Insecure, Tell: o.tell}
	own, err := caller.DialOptions(o.Scheduler)
	own = append(own, addresses.Known())
	return append(own, o.DialOptions...), err // the last one holds
}

func (o *Options) door() security.Door {
	return security.Door{Certificate: o.TLSCert, Key: o.TLSKey, ClientCA: o.TLSClientCA, TokenFile: o.DirectTokenFile,
		Tell: o.tell}
}

// tell what became of a file that has changed.
func (o *Options) tell(message string, err error) {
	switch {
	case o.Logger == nil:
	case err != nil:
		o.Logger.Error(message, "error", err)
	default:
		o.Logger.Info(message)
	}
}

func asText(into *string) func(string) error {
	return func(value string) error {
		*into = value
		return nil
	}
}

func asBool(into *bool) func(string) error {
	return func(value string) error {
		parsed, err := strconv.ParseBool(value)
		*into = parsed
		if err != nil {
			return fmt.Errorf("%q is neither true nor false", value)
		}
		return nil
	}
}

func asNumber[N int | int64](into *N) func(string) error {
	return func(value string) error {
		parsed, err := strconv.ParseInt(value, 10, 64)
		*into = N(parsed)
		if err != nil {
			return fmt.Errorf("%q is not a number", value)
		}
		return nil
	}
}

func asSeconds(into *time.Duration) func(string) error {
	return func(value string) error {
		parsed, err := strconv.ParseFloat(value, 64)
		if err != nil || !(parsed >= 0 && parsed < 1e9) {
			return fmt.Errorf("%q is not a number of seconds", value)
		}
		*into = time.Duration(parsed * float64(time.Second))
		return nil
	}
}

func asLabels(into *map[string]string) func(string) error {
	return func(value string) error {
		parsed := map[string]string{}
		for part := range strings.SplitSeq(value, ",") {
			if part = strings.TrimSpace(part); part == "" {
				continue
			}
			key, label, found := strings.Cut(part, "=")
			if !found || strings.TrimSpace(key) == "" {
				return fmt.Errorf("%q is not of the form key=value", part)
			}
			parsed[strings.TrimSpace(key)] = strings.TrimSpace(label)
		}
		*into = parsed
		return nil
	}
}

func asOneOf(into *string, allowed ...string) func(string) error {
	return func(value string) error {
		for _, known := range allowed {
			if value == known {
				*into = value
				return nil
			}
		}
		return fmt.Errorf("%q is none of %s", value, strings.Join(allowed, ", "))
	}
}
