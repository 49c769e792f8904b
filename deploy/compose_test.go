// Package deploy_test checks what operators deploy with tools that may be absent here.
package deploy_test

import (
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
	"github.com/go-sql-driver/mysql"

	"backstep/internal/app"
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
	for name, image := range map[string]string{
		"mysql": "mysql:8.4", "rabbitmq": "rabbitmq:4.3-management", "jaeger": "jaegertracing/jaeger:2.",
		"migrate": "backstep:", "topology": "backstep:", "relay": "backstep:", "worker": "backstep:", "backstep": "backstep:",
	} {
		if s, ok := project.Services[name]; !ok || !strings.HasPrefix(s.Image, image) {
			t.Errorf("service %s has image %q, want %s", name, s.Image, image)
		}
	}
	for name, s := range project.Services {
		// Without a tag, or with one that moves, two machines run different things.
		if _, tag, ok := strings.Cut(s.Image, ":"); !ok || tag == "latest" || tag == "lts" {
			t.Errorf("service %s has image %q, want a tag that says which", name, s.Image)
		}
	}
	for _, name := range []string{"mysql", "rabbitmq", "relay", "worker"} {
		if s := project.Services[name]; s.HealthCheck == nil || len(s.HealthCheck.Test) == 0 {
			t.Errorf("service %s has no health check", name)
		}
	}
}

// Each waits for what it needs, and only for what can come about: healthy needs a health
// check, completed a service that ends.
func TestComposeDependencies(t *testing.T) {
	project := load(t)
	completed, healthy := types.ServiceConditionCompletedSuccessfully, types.ServiceConditionHealthy
	for name, needs := range map[string]map[string]string{
		"migrate":  {"mysql": healthy},
		"topology": {"rabbitmq": healthy},
		"relay":    {"migrate": completed, "topology": completed},
		"worker":   {"migrate": completed, "topology": completed},
	} {
		for other, want := range needs {
			if got := project.Services[name].DependsOn[other].Condition; got != want {
				t.Errorf("service %s waits until %s is %q, want %q", name, other, got, want)
			}
			if s := project.Services[other]; want == completed && (s.Restart != "" && s.Restart != "no" && s.Restart != "on-failure") {
				t.Errorf("service %s never ends: restart %q", other, s.Restart)
			}
		}
	}
}

// A fixed name or host port would keep --scale from working.
func TestComposeServicesScale(t *testing.T) {
	project := load(t)
	for _, name := range []string{"relay", "worker"} {
		if s := project.Services[name]; s.ContainerName != "" || len(s.Ports) > 0 || s.Hostname != "" {
			t.Errorf("service %s has container name %q, host name %q and ports %v", name, s.ContainerName, s.Hostname, s.Ports)
		}
	}
}

// Several services that build one tag at once fail with "already exists".
func TestComposeBuildsOnce(t *testing.T) {
	builds := 0
	for name, s := range load(t).Services {
		switch {
		case !strings.HasPrefix(s.Image, "backstep:"):
		case s.Build != nil:
			builds++
		case s.PullPolicy != types.PullPolicyNever:
			t.Errorf("service %s would pull %s from a registry", name, s.Image)
		}
	}
	if builds != 1 {
		t.Errorf("%d services build the image, want 1", builds)
	}
}

// What the binaries are given is what they know, and points to services of this file.
func TestComposeEnvironment(t *testing.T) {
	project := load(t)
	for name, s := range project.Services {
		if !strings.HasPrefix(s.Image, "backstep:") {
			continue
		}
		env := map[string]string{}
		for variable, value := range s.Environment {
			if value == nil {
				t.Errorf("service %s takes %s from whoever starts it", name, variable)
				continue
			}
			env[variable] = *value
			if strings.HasPrefix(variable, app.Prefix) && !slices.Contains(app.Variables, variable) {
				t.Errorf("service %s sets %s, which no binary knows", name, variable)
			}
		}
		dsn, amqp := env["BACKSTEP_MYSQL_DSN"], env["BACKSTEP_AMQP_URL"]
		if err := app.CheckServers(dsn, amqp); err != nil || dsn == "" || amqp == "" {
			t.Errorf("service %s: BACKSTEP_MYSQL_DSN and BACKSTEP_AMQP_URL: %v", name, err)
			continue
		}
		cfg, err := mysql.ParseDSN(dsn)
		if err != nil {
			t.Fatal(err)
		}
		db := project.Services["mysql"].Environment
		if cfg.Addr != "mysql:3306" || cfg.User != *db["MYSQL_USER"] || cfg.Passwd != *db["MYSQL_PASSWORD"] || cfg.DBName != *db["MYSQL_DATABASE"] {
			t.Errorf("service %s: BACKSTEP_MYSQL_DSN does not go with service mysql", name)
		}
		mq := project.Services["rabbitmq"].Environment
		pointsTo(t, amqp, "rabbitmq:5672", url.UserPassword(*mq["RABBITMQ_DEFAULT_USER"], *mq["RABBITMQ_DEFAULT_PASS"]))
		switch name {
		case "topology":
			pointsTo(t, env["BACKSTEP_AMQP_MANAGEMENT_URL"], "rabbitmq:15672", url.UserPassword(*mq["RABBITMQ_DEFAULT_USER"], *mq["RABBITMQ_DEFAULT_PASS"]))
		case "relay", "worker":
			pointsTo(t, env["OTEL_EXPORTER_OTLP_ENDPOINT"], "jaeger:4318", nil)
			if _, port, _ := strings.Cut(env["BACKSTEP_ADMIN_ADDR"], ":"); port == "" || port == "0" {
				t.Errorf("service %s has a health check and BACKSTEP_ADMIN_ADDR %q", name, env["BACKSTEP_ADMIN_ADDR"])
			}
		}
	}
}

func pointsTo(t *testing.T, raw, host string, user *url.Userinfo) {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	if u.Host != host || u.User.String() != user.String() {
		t.Errorf("%s points to %s as %s, want %s as %s", raw, u.Host, u.User, host, user)
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

// The image is static binaries on a base without a shell, and not root. The Go version is
// that of go.mod.
func TestDockerfile(t *testing.T) {
	b, err := os.ReadFile("../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	mod, err := os.ReadFile("../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	stages := regexp.MustCompile(`(?m)^FROM `).Split(string(b), -1)[1:]
	if len(stages) != 2 {
		t.Fatalf("%d stages, want 2", len(stages))
	}
	version := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindStringSubmatch(string(mod))[1]
	if !strings.HasPrefix(stages[0], "golang:"+version+" AS build\n") || !strings.Contains(stages[0], "CGO_ENABLED=0 go build ") {
		t.Errorf("the build stage does not build static binaries with Go %s:\n%s", version, stages[0])
	}
	if !regexp.MustCompile(`^\S*/static-\S*:nonroot\n`).MatchString(stages[1]) || !strings.Contains(stages[1], "\nUSER nonroot\n") || strings.Contains(stages[1], "\nRUN ") {
		t.Errorf("the last stage has a shell, or root:\n%s", stages[1])
	}
}
