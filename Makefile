# One page of targets; `make` lists them. Nothing but Go and a C compiler (for the race
# detector) has to be installed: testenv finds or installs the servers.

GOLANGCI_LINT_VERSION = v2.15.0
GOLANGCI_LINT ?= .cache/golangci-lint-$(GOLANGCI_LINT_VERSION)/golangci-lint

# STACK=current: MySQL and RabbitMQ as Debian's unstable suite has them, in a folder of their own.
STACK_ENV = $(if $(STACK),TEST_STACK=$(STACK))

.DEFAULT_GOAL := help
.PHONY: help build demo bench test lint

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## build bin/worker, bin/relay and bin/backstep
	go build -o bin/ ./cmd/...

demo: build ## run orders through the whole system, with faults (KEEP=1: leave it running, ORDERS=n: how many, STACK=current)
	$(STACK_ENV) bin/backstep demo $(if $(filter-out 0,$(KEEP)),--keep) $(if $(ORDERS),--orders $(ORDERS))

bench: build ## measure relay, latency, schedule and sagas, beside what the servers do without us (a quarter of an hour; STACK=current)
	$(STACK_ENV) bin/backstep bench relay
	$(STACK_ENV) bin/backstep bench latency
	$(STACK_ENV) bin/backstep bench schedule
	$(STACK_ENV) bin/backstep bench saga

test: ## run all tests with the race detector, on servers it starts, or on TEST_MYSQL_DSN and TEST_AMQP_URL (STACK=current: on current servers)
	go build -o bin/ ./internal/testenv/cmd/withservers
	GORACE=atexit_sleep_ms=0 $(STACK_ENV) bin/withservers -- go test -race -timeout 15m -p 2 ./...

lint: $(GOLANGCI_LINT) ## check with go vet, gofmt, golangci-lint and go mod tidy
	go vet ./...
	@files=$$(gofmt -l .); [ -z "$$files" ] || { echo "gofmt has not seen: $$files"; exit 1; }
	$(GOLANGCI_LINT) run ./...
	go mod tidy -diff

.cache/golangci-lint-%/golangci-lint:
	GOBIN=$(abspath $(@D)) go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$*
