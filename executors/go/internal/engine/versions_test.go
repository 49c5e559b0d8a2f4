package engine_test

import (
	"context"
	"net"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/rara-run/rara/executors/go/internal/engine"
	"github.com/rara-run/rara/executors/go/internal/scripted"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

var next = engine.Versions{Oldest: 1, Newest: 2}

// start runs an executor until the test ends.
func start(t *testing.T, config engine.Config) {
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- engine.New(config).Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func refusal(t *testing.T, oldest, newest string) error {
	answer, err := status.New(codes.FailedPrecondition, "not spoken here").WithDetails(&errdetails.ErrorInfo{
		Reason: "PROTOCOL_VERSION_UNSUPPORTED", Metadata: map[string]string{"oldest": oldest, "newest": newest}})
	if err != nil {
		t.Fatal(err)
	}
	return answer.Err()
}

// A new executor with an old scheduler: it says the version before, and with a new one its own again.
func TestAnOldSchedulerIsSpokenToInItsVersion(t *testing.T) {
	scheduler := scripted.Start(t)
	given := config(t, scheduler)
	given.Versions = next
	start(t, given)
	expect := func(version uint32) *scripted.Session {
		session := scheduler.Session(t)
		if said := session.Hello.ProtocolVersion; said != version {
			t.Errorf("says version %d, not %d", said, version)
		}
		return session
	}
	expect(2).Cut(refusal(t, "1", "1"))
	old := expect(1)
	old.Welcome(scripted.Terms{})
	old.Cut(nil)
	expect(2).Cut(refusal(t, "1", "1"))
	expect(1).Cut(refusal(t, "3", "4")) // nothing that both speak: it goes on asking
	last := expect(1)
	last.Welcome(scripted.Terms{})
}

// A new executor that an old or a new scheduler dials answers in the version that it is asked in.
func TestADialledExecutorAnswersInTheVersionAsked(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	listener.Close()
	given := config(t, scripted.Start(t))
	given.Versions, given.Listen = next, listener.Addr().String()
	listening := make(chan string, 1)
	given.OnListening = func(address string) { listening <- address }
	start(t, given)
	connection, err := grpc.NewClient(<-listening, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close()
	client := rarav1.NewExecutorServiceClient(connection)
	for _, version := range []uint32{1, 2} {
		answer, err := client.GetCapabilities(t.Context(), &rarav1.GetCapabilitiesRequest{ProtocolVersion: version})
		if err != nil || answer.Hello.ProtocolVersion != version {
			t.Errorf("asked in %d: %v, %v", version, answer, err)
		}
	}
	_, err = client.GetCapabilities(t.Context(), &rarav1.GetCapabilitiesRequest{ProtocolVersion: 3})
	info, ok := status.Convert(err).Details()[0].(*errdetails.ErrorInfo)
	if !ok || info.Metadata["oldest"] != "1" || info.Metadata["newest"] != "2" {
		t.Errorf("got %v", err)
	}
}
