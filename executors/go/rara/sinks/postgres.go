package sinks

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

const maxIdentifierBytes = 63 // PostgreSQL cuts longer ones without an error

// Querier is a *sql.DB, *sql.Conn or *sql.Tx.
type Querier interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// Row is a row of a table, perhaps with its schema, as in "results.scores". Key has the columns of a primary key or
// unique constraint, and exactly them.
type Row struct {
	Table  string
	Key    map[string]any
	Values map[string]any
	// FenceColumn is a bigint that holds the largest token. Empty: lease_token.
	FenceColumn string
}

// Upsert inserts the row, or updates the one with its key if no newer attempt has written it; else the error is
// ErrSuperseded. The table is the caller's, with a column `lease_token bigint`: nothing is created here.
//
// In a transaction of READ COMMITTED, the default, a writer waits for another one's commit and then looks again.
func Upsert(ctx context.Context, db Querier, token int64, row Row) error {
	query, args, err := row.Statement(token)
	if err != nil {
		return err
	}
	var written int
	switch err := db.QueryRowContext(ctx, query, args...).Scan(&written); {
	case errors.Is(err, sql.ErrNoRows):
		return Superseded("table "+row.Table, token)
	case err != nil:
		return fmt.Errorf("upsert into %s: %w", row.Table, err)
	}
	return nil
}

// Statement is what Upsert runs, for drivers with an interface of their own, such as pgx. No row back: superseded.
func (r Row) Statement(token int64) (string, []any, error) {
	if err := CheckToken(token); err != nil {
		return "", nil, err
	}
	if len(r.Key) == 0 {
		return "", nil, errors.New("key: must name at least one column")
	}
	fence := r.FenceColumn
	if fence == "" {
		fence = "lease_token"
	}
	columns := append(slices.Sorted(maps.Keys(r.Key)), slices.Sorted(maps.Keys(r.Values))...)
	columns = append(columns, fence)
	names := make([]string, len(columns))
	places := make([]string, len(columns))
	args := make([]any, 0, len(columns))
	seen := map[string]bool{}
	for i, column := range columns {
		name, err := quoted(column)
		if err != nil {
			return "", nil, err
		}
		if seen[column] {
			return "", nil, fmt.Errorf("column %q is there twice", column)
		}
		seen[column] = true
		names[i], places[i] = name, fmt.Sprintf("$%d", i+1)
		switch {
		case i < len(r.Key):
			args = append(args, r.Key[column])
		case i < len(columns)-1:
			args = append(args, r.Values[column])
		}
	}
	table, err := quotedTable(r.Table)
	if err != nil {
		return "", nil, err
	}
	var changed []string
	for _, name := range names[len(r.Key):] {
		changed = append(changed, name+" = excluded."+name)
	}
	last := names[len(names)-1]
	query := fmt.Sprintf("insert into %s as held (%s) values (%s) on conflict (%s) do update set %s"+
		" where held.%s is null or held.%s <= excluded.%s returning 1",
		table, strings.Join(names, ", "), strings.Join(places, ", "), strings.Join(names[:len(r.Key)], ", "),
		strings.Join(changed, ", "), last, last, last)
	return query, append(args, token), nil
}

func quotedTable(name string) (string, error) {
	parts := strings.Split(name, ".")
	for i, part := range parts {
		name, err := quoted(part)
		if err != nil {
			return "", err
		}
		parts[i] = name
	}
	return strings.Join(parts, "."), nil
}

func quoted(identifier string) (string, error) {
	if identifier == "" || len(identifier) > maxIdentifierBytes || strings.ContainsRune(identifier, 0) {
		return "", fmt.Errorf("%q is no name of a table or column", identifier)
	}
	return `"` + strings.ReplaceAll(identifier, `"`, `""`) + `"`, nil
}
