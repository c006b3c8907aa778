# Two commands do everything: `make demo` and `make test`. Both make .venv when it is missing.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-links test-integrations lint format clean
.DELETE_ON_ERROR:

demo: .venv/ready ## trains a small language model on two processes, each step under a plan that the planner chose
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 \
		examples/train_lm.py --out runs/demo --show-program

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test-links: .venv/ready ## on hosts with slow links: needs Linux, root, iproute2 and an idle machine
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m links tests/test_replan.py

test-integrations: .venv/ready ## models of other libraries; installs them
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,integrations]'
	$(BIN)/python -m pytest tests/test_integrations_transformers.py tests/test_integrations_changes.py tests/test_router_peers.py fmoe/integrations

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf .venv runs build *.egg-info
