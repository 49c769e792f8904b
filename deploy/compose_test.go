// Package deploy_test checks what operators deploy with tools that may be absent here.
package deploy_test

import (
	"slices"
	"testing"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
)

func load(t *testing.T) *types.Project {
	t.Helper()
	options, err := cli.NewProjectOptions([]string{"../docker-compose.yml"}, cli.WithName("backstep"), cli.WithProfiles([]string{"*"}))
	if err != nil {
		t.Fatal(err)
	}
	project, err := options.LoadProject(t.Context())
	if err != nil {
		t.Fatalf("docker-compose.yml: %v", err)
	}
	return project
}

func TestComposeServices(t *testing.T) {
	project := load(t)
	names := project.ServiceNames()
	for _, want := range []string{"mysql", "rabbitmq", "jaeger", "migrate", "topology", "relay", "worker"} {
		if !slices.Contains(names, want) {
			t.Errorf("no service %s among %v", want, names)
		}
	}
	for _, name := range []string{"mysql", "rabbitmq", "relay", "worker"} {
		if s := project.Services[name]; s.HealthCheck == nil || len(s.HealthCheck.Test) == 0 {
			t.Errorf("service %s has no health check", name)
		}
	}
}

// A fixed name or host port would keep --scale from working.
func TestComposeServicesScale(t *testing.T) {
	project := load(t)
	for _, name := range []string{"relay", "worker"} {
		s := project.Services[name]
		if s.ContainerName != "" || len(s.Ports) > 0 {
			t.Errorf("service %s has container name %q and ports %v", name, s.ContainerName, s.Ports)
		}
		for _, needs := range []string{"migrate", "topology"} {
			if got := s.DependsOn[needs].Condition; got != types.ServiceConditionCompletedSuccessfully {
				t.Errorf("service %s starts when %s is %q, want completed", name, needs, got)
			}
		}
		for _, variable := range []string{"BACKSTEP_MYSQL_DSN", "BACKSTEP_AMQP_URL", "BACKSTEP_ADMIN_ADDR"} {
			if v := s.Environment[variable]; v == nil || *v == "" {
				t.Errorf("service %s has no %s", name, variable)
			}
		}
	}
}

func TestComposePublishesToLoopbackOnly(t *testing.T) {
	for name, s := range load(t).Services {
		for _, p := range s.Ports {
			if p.HostIP != "127.0.0.1" {
				t.Errorf("service %s publishes port %d on %q, want 127.0.0.1", name, p.Target, p.HostIP)
			}
		}
	}
}
