// Package rara is the SDK for executors in Go: programs that run the steps of Rara's workflows.
//
// An operation is a typed function under a kind and a version. Its input and output are whatever encoding/json knows:
//
//	registry := rara.NewRegistry()
//	rara.Register(registry, "text.count", "1.0.0", func(ctx context.Context, job *rara.Job[Text]) (Counts, error) {
//		...
//	})
//	rara.Main(registry)
//
// Main is a whole program: settings from the environment and flags, signals, exit codes. NewExecutor and Executor.Run
// are for programs that do more than that.
//
// # What a handler can rely on
//
// It is called once for an attempt, after the scheduler has stored that this executor has taken the step up. An attempt
// may be one of several: effects outside belong into Once, or carry job.IdempotencyKey, and a sink that compares
// job.LeaseToken refuses writers that were overtaken.
//
// Its context is cancelled when it is to stop, because somebody asked, a limit has passed, the executor stops, or the
// lease is no longer certain; CancelReason tells. It should return soon, and may return a result all the same: what is
// done is done. The context has the job's deadline, and the trace of the run.
//
// An error ends the attempt: an [Error] with its code, anything else as HANDLER_FAILED, which is tried again. A panic is
// HANDLER_PANIC with its stack, and costs nobody but its own step. A panic in a goroutine that the handler has started
// cannot be caught by anybody: it ends the process, and the steps that ran in it are leased again.
//
// # What a handler must not do
//
// Nothing can end a goroutine from outside. A handler that ignores its context is reported and fenced after the grace:
// its step ends, nothing that it says later counts, and its slot stays taken until it returns. Executor.IsReady is false
// when no slot is left for such handlers. [OwnProcess] gives each job of an operation a process that can be killed.
//
// # Secrets
//
// job.Secrets holds what the step's references resolve to in this process: environment variables and files. They are
// replaced by *** in everything that the executor sends and in its log, also URL-encoded and in base64. Bytes of
// artifacts are the handler's own.
package rara
