package logs

import (
	"context"
	"log/slog"
	"sync"
)

// Lazy is the logger that made returns, which is called for the first line that plain would write.
func Lazy(plain *slog.Logger, made func() *slog.Logger) *slog.Logger {
	return slog.New(&lazy{plain.Handler(), sync.OnceValue(func() slog.Handler { return made().Handler() })})
}

type lazy struct {
	plain slog.Handler
	made  func() slog.Handler
}

func (l *lazy) Enabled(ctx context.Context, level slog.Level) bool {
	return l.plain.Enabled(ctx, level)
}

func (l *lazy) Handle(ctx context.Context, record slog.Record) error {
	return l.made().Handle(ctx, record)
}

func (l *lazy) WithAttrs(attrs []slog.Attr) slog.Handler { return l.made().WithAttrs(attrs) }

func (l *lazy) WithGroup(name string) slog.Handler { return l.made().WithGroup(name) }
