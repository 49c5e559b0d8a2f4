// Package logs makes log lines that hold no secret.
package logs

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/rara-run/rara/executors/go/internal/redact"
	"github.com/rara-run/rara/executors/go/internal/text"
)

// New writes lines as Rara's other services do. format: json, console, or auto for
// columns where standard error is a terminal; level: debug, info, warning or error.
func New(writer io.Writer, format, level string) *slog.Logger {
	levels := map[string]slog.Level{
		"debug": slog.LevelDebug, "info": slog.LevelInfo, "warning": slog.LevelWarn, "error": slog.LevelError,
	}
	options := &slog.HandlerOptions{Level: levels[level], ReplaceAttr: spell}
	if format == "console" || (format == "auto" && isTerminal(os.Stderr)) {
		return slog.New(slog.NewTextHandler(writer, options))
	}
	return slog.New(slog.NewJSONHandler(writer, options))
}

func isTerminal(file *os.File) bool {
	info, err := file.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// spell names the fixed keys as structlog does on the other side.
func spell(groups []string, attr slog.Attr) slog.Attr {
	if len(groups) > 0 {
		return attr
	}
	switch attr.Key {
	case slog.MessageKey:
		attr.Key = "event"
	case slog.TimeKey:
		attr.Key = "timestamp"
	case slog.LevelKey:
		level := strings.ToLower(attr.Value.String())
		return slog.String("level", strings.Replace(level, "warn", "warning", 1))
	}
	return attr
}

// Redacted replaces secrets in every message and value before they reach the logger's own handler.
func Redacted(logger *slog.Logger, redactor *redact.Redactor) *slog.Logger {
	return slog.New(&handler{logger.Handler(), redactor})
}

type handler struct {
	inner    slog.Handler
	redactor *redact.Redactor
}

func (h *handler) Enabled(ctx context.Context, level slog.Level) bool {
	return h.inner.Enabled(ctx, level)
}

func (h *handler) WithGroup(name string) slog.Handler {
	return &handler{h.inner.WithGroup(name), h.redactor}
}

func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &handler{h.inner.WithAttrs(h.attrs(attrs)), h.redactor}
}

func (h *handler) Handle(ctx context.Context, record slog.Record) error {
	clean := slog.NewRecord(record.Time, record.Level, h.text(record.Message), record.PC)
	record.Attrs(func(attr slog.Attr) bool {
		clean.AddAttrs(h.attr(attr))
		return true
	})
	return h.inner.Handle(ctx, clean)
}

func (h *handler) attrs(attrs []slog.Attr) []slog.Attr {
	clean := make([]slog.Attr, len(attrs))
	for i, attr := range attrs {
		clean[i] = h.attr(attr)
	}
	return clean
}

func (h *handler) attr(attr slog.Attr) slog.Attr {
	key, value := h.redactor.Text(attr.Key), attr.Value.Resolve()
	switch value.Kind() {
	case slog.KindString:
		return slog.String(key, h.text(value.String()))
	case slog.KindGroup:
		return slog.Attr{Key: key, Value: slog.GroupValue(h.attrs(value.Group())...)}
	case slog.KindAny: // of any shape: its text is all that can be looked into
		return slog.String(key, h.text(fmt.Sprint(value.Any())))
	default:
		return slog.Attr{Key: key, Value: value}
	}
}

func (h *handler) text(message string) string {
	return text.Cut(h.redactor.Text(text.Valid(message)), text.MaxMessageBytes)
}
