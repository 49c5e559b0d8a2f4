package sinks_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/rara-run/rara/executors/go/rara"
	"github.com/rara-run/rara/executors/go/rara/sinks"
)

const writers = 8

// TestMain is also the process that TestAKilledWriter kills.
func TestMain(m *testing.M) {
	if path := os.Getenv("RARA_TEST_WRITE"); path != "" {
		for n := 0; ; n++ { // until it is killed
			data := bytes.Repeat([]byte{byte('a' + n%26)}, 4<<20)
			if err := sinks.WriteFile(context.Background(), 5, path, bytes.NewReader(data)); err != nil {
				panic(err)
			}
			fmt.Println(n)
		}
	}
	os.Exit(m.Run())
}

func database(t *testing.T) *sql.DB {
	t.Helper()
	address := os.Getenv("RARA_TEST_DATABASE")
	if address == "" {
		t.Skip("tests/wire/test_sinks.py runs this with a database")
	}
	db, err := sql.Open("pgx", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

func isSuperseded(t *testing.T, err error) {
	t.Helper()
	var own *rara.Error
	if !errors.Is(err, sinks.ErrSuperseded) || !errors.As(err, &own) || own.Code != "WRITE_SUPERSEDED" {
		t.Fatalf("got %v", err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// contend lets 8 writers write at once, each under a token of its own; the largest.
func contend(t *testing.T, write func(token int64) error) int64 {
	t.Helper()
	tokens := rand.Perm(1000)[:writers]
	var done sync.WaitGroup
	var largest int64
	begin := make(chan struct{})
	for _, n := range tokens {
		token := int64(n + 10)
		largest = max(largest, token)
		done.Go(func() {
			<-begin
			if err := write(token); err != nil && !errors.Is(err, sinks.ErrSuperseded) {
				t.Error(err)
			}
		})
	}
	close(begin)
	done.Wait()
	return largest
}

func TestARowKeepsTheLargestToken(t *testing.T) {
	db := database(t)
	ctx := t.Context()
	const table = `go odd"schema.the "scores"; drop table x; --`
	_, err := db.ExecContext(ctx, `create schema "go odd""schema"; create table "go odd""schema"."the ""scores""; `+
		`drop table x; --" ("mo del" text, part int, score float8, note text, lease_token bigint, primary key ("mo del", part))`)
	must(t, err)
	row := func(score float64) sinks.Row {
		return sinks.Row{Table: table, Key: map[string]any{"mo del": "m", "part": 1},
			Values: map[string]any{"score": score, "note": fmt.Sprint(score)}}
	}
	check := func(score float64, token int64) {
		t.Helper()
		var gotScore float64
		var note string
		var got int64
		must(t, db.QueryRowContext(ctx, `select score, note, lease_token from "go odd""schema"."the ""scores""; `+
			`drop table x; --" where "mo del" = 'm'`).Scan(&gotScore, &note, &got))
		if gotScore != score || note != fmt.Sprint(score) || got != token {
			t.Fatalf("got %v %v %v", gotScore, note, got)
		}
	}
	must(t, sinks.Upsert(ctx, db, 5, row(0.5)))
	check(0.5, 5)
	must(t, sinks.Upsert(ctx, db, 5, row(0.6))) // the same attempt again
	check(0.6, 5)
	must(t, sinks.Upsert(ctx, db, 7, row(0.7)))
	isSuperseded(t, sinks.Upsert(ctx, db, 5, row(0.9)))
	check(0.7, 7)
	largest := contend(t, func(token int64) error { return sinks.Upsert(ctx, db, token, row(float64(token))) })
	check(float64(largest), largest)
	_, err = db.ExecContext(ctx, `update "go odd""schema"."the ""scores""; drop table x; --" set lease_token = null`)
	must(t, err)
	must(t, sinks.Upsert(ctx, db, 1, row(1))) // a row from before there was a fence
	check(1, 1)
}

func TestABadStatementIsNamed(t *testing.T) {
	t.Parallel()
	key := map[string]any{"id": 1}
	for problem, row := range map[string]sinks.Row{
		"at least one column":  {Table: "t"},
		"there twice":          {Table: "t", Key: key, Values: map[string]any{"lease_token": 1}},
		"no name of a table":   {Table: "a..b", Key: key},
		"no name of a table o": {Table: "t", Key: map[string]any{strings.Repeat("x", 64): 1}},
	} {
		if _, _, err := row.Statement(1); err == nil || !strings.Contains(err.Error(), problem) {
			t.Errorf("%s: got %v", problem, err)
		}
	}
	if _, _, err := (sinks.Row{Table: "t", Key: key}).Statement(0); err == nil {
		t.Error("token 0 passed")
	}
}

func TestAFileKeepsTheLargestToken(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	path := filepath.Join(t.TempDir(), "report.json")
	write := func(token int64, text string) error {
		return sinks.WriteFile(ctx, token, path, strings.NewReader(text))
	}
	check := func(want string) {
		t.Helper()
		got, err := os.ReadFile(path)
		must(t, err)
		if string(got) != want {
			t.Fatalf("got %q", got)
		}
	}
	must(t, os.WriteFile(path, []byte("unfenced"), 0o600))
	must(t, write(5, "five"))
	must(t, write(5, "five again"))
	must(t, write(7, "seven"))
	isSuperseded(t, write(5, "late"))
	check("seven")
	largest := contend(t, func(token int64) error {
		return write(token, strings.Repeat(fmt.Sprintf("%d\n", token), 10_000))
	})
	check(strings.Repeat(fmt.Sprintf("%d\n", largest), 10_000))
	names, err := filepath.Glob(filepath.Join(filepath.Dir(path), ".*"))
	must(t, err)
	if len(names) != 1 || filepath.Base(names[0]) != ".report.json.fence" {
		t.Fatalf("left: %v", names)
	}
}

func TestAKilledWriterLeavesAWholeFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "big")
	for round := range 3 {
		child := exec.Command(os.Args[0])
		child.Env = append(os.Environ(), "RARA_TEST_WRITE="+path)
		said, err := child.StdoutPipe()
		must(t, err)
		must(t, child.Start())
		_, err = said.Read(make([]byte, 1)) // it has written once
		must(t, err)
		time.Sleep(time.Duration(rand.IntN(30)) * time.Millisecond) // a moment of a write, whichever
		must(t, child.Process.Kill())
		_ = child.Wait()
		data, err := os.ReadFile(path)
		must(t, err)
		if len(data) != 4<<20 || bytes.Count(data, data[:1]) != len(data) {
			t.Fatalf("round %d: %d bytes, not all the same", round, len(data))
		}
		isSuperseded(t, sinks.WriteFile(t.Context(), 4, path, strings.NewReader("older")))
	}
	must(t, sinks.WriteFile(t.Context(), 6, path, strings.NewReader("newer")))
	names, err := filepath.Glob(filepath.Join(filepath.Dir(path), ".big.*.part"))
	must(t, err)
	if len(names) > 0 {
		t.Fatalf("left: %v", names)
	}
}

func TestALockedFileIsWaitedForWithABound(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "held")
	inside := make(chan struct{})
	release := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() { must(t, sinks.HoldLock(path, inside, release)) })
	<-inside
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	var own *rara.Error
	if err := sinks.WriteFile(ctx, 1, path, strings.NewReader("x")); !errors.As(err, &own) || own.Code != "WRITE_BLOCKED" {
		t.Fatalf("got %v", err)
	}
	close(release)
	done.Wait()
	must(t, sinks.WriteFile(t.Context(), 1, path, strings.NewReader("x")))
}

// TestAcrossLanguages is the middle of a test in Python, which has written under 5 before and looks afterwards.
func TestAcrossLanguages(t *testing.T) {
	db := database(t)
	path := os.Getenv("RARA_TEST_FILE")
	row := sinks.Row{Table: "shared", Key: map[string]any{"id": "x"}, Values: map[string]any{"value": "go"}}
	isSuperseded(t, sinks.Upsert(t.Context(), db, 4, row))
	isSuperseded(t, sinks.WriteFile(t.Context(), 4, path, strings.NewReader("go")))
	must(t, sinks.Upsert(t.Context(), db, 6, row))
	must(t, sinks.WriteFile(t.Context(), 6, path, strings.NewReader("go")))
}
