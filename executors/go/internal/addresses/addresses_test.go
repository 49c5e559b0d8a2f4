package addresses_test

import (
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/rara-run/rara/executors/go/internal/addresses"
)

func TestTheFirstThatAnswersIsCalled(t *testing.T) {
	gone, there := listen(t), listen(t)
	gone.Close()
	server := grpc.NewServer()
	grpc_health_v1.RegisterHealthServer(server, health.NewServer())
	go server.Serve(there)
	defer server.Stop()
	if err := check(t, "ipv4:"+gone.Addr().String()+","+there.Addr().String()); err != nil {
		t.Error(err)
	}
}

func TestWhatIsNoAddressIsRefused(t *testing.T) {
	for _, target := range []string{"ipv4:", "ipv4:host:1", "ipv4:127.0.0.1", "ipv4:127.0.0.1:1,"} {
		if err := check(t, target); err == nil {
			t.Errorf("%s is taken", target)
		}
	}
}

func listen(t *testing.T) net.Listener {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return listener
}

func check(t *testing.T, target string) error {
	connection, err := grpc.NewClient(
		target, addresses.Known(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	_, err = grpc_health_v1.NewHealthClient(connection).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{})
	return err
}
