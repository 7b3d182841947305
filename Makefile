# `make`, or `make help`, shows the targets. Each makes the environment (.venv) when
# it is missing.

# The Python that a new .venv is made with (empty: the newest of 3.11 to 3.13 that is found).
PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# For make pretrain: ranks; text as names and globs (empty: English Wikipedia leads);
# its encoding and language; the model: bert, modern, or a preset; the output folder.
NP ?= 2
CORPUS ?=
ENCODING ?= utf-8
# (The environment's LANGUAGE is gettext's, so it is not taken from there.)
LANGUAGE := en
MODEL ?= bert
OUTPUT_DIR ?= runs/quickstart
# For make search: what to find.
QUERY ?= a river in France
# For make tensorboard: the folder whose runs are shown (empty: OUTPUT_DIR).
RUN ?=

# A machine with an NVIDIA GPU gets TensorFlow with CUDA and Horovod with NCCL. An
# environment that is there stays of its kind, unless VARIANT says otherwise.
INSTALLED := $(shell tools/variant.sh installed $(VENV))
VARIANT ?= $(or $(INSTALLED),$(shell tools/variant.sh machine))

# Quotes any text as one word for the shell. ($(value NAME) is the text given for NAME,
# before make expands variables in it.)
quoted = '$(subst ','\'',$(1))'

.PHONY: help env horovod pretrain search tensorboard test slow-test fuzz bench lint format horovod-gpu clean
.PHONY: other-variant

help: ## these lines
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s  %s\n", $$1, $$2}' Makefile

env: $(READY) ## the environment .venv (2 to 6 minutes)
	@tools/variant.sh advise $(VENV)

# What is needed beside training: images have text and search of these.
TO_DEVELOP := $(patsubst %,requirements/%.txt,horovod text search tests)

$(READY): $(if $(filter-out $(VARIANT),$(INSTALLED)),other-variant) requirements.txt requirements/$(VARIANT).txt $(TO_DEVELOP) requirements/constraints.txt $(wildcard xla_patches/*.sh xla_patches/horovod/*.patch)
	@echo "environment: $(VENV), $(VARIANT) (2 to 6 minutes)"
	@tools/make_venv.sh $(call quoted,$(PYTHON)) $(VENV) $(VARIANT)
	@xla_patches/build_horovod.sh check-$(VARIANT) $(BIN)/python || true
	@tools/progress.sh pip $(BIN)/python -m pip install -r requirements/$(VARIANT).txt $(addprefix -r ,$(TO_DEVELOP)) -c requirements/constraints.txt
	@xla_patches/build_horovod.sh $(VARIANT) $(BIN)/python || true # one rank needs none
	@# This folder, from there: so `python -m tools....` works in any folder.
	@for packages in $(VENV)/lib/python3*/site-packages; do echo ../../../.. >"$$packages/perseus-bert.pth"; done
	@touch $@

horovod: $(READY) ## Horovod in .venv, where make env could not build it
	@$(BIN)/python -c 'import horovod.tensorflow' 2>/dev/null || xla_patches/build_horovod.sh $(VARIANT) $(BIN)/python

pretrain: $(READY) ## text to a BERT: CORPUS='texts/*.txt' NP=2 OUTPUT_DIR=runs/mine
	@$(BIN)/python -m tools.quickstart --num_ranks=$(call quoted,$(value NP)) \
	  --corpus=$(call quoted,$(value CORPUS)) --encoding=$(call quoted,$(value ENCODING)) \
	  --language=$(call quoted,$(value LANGUAGE)) --model=$(call quoted,$(value MODEL)) \
	  --output_dir=$(call quoted,$(value OUTPUT_DIR))

search: $(READY) ## then a search of that text: QUERY='a river in France' OUTPUT_DIR=runs/mine
	@tools/search_own_text.sh $(call quoted,$(value OUTPUT_DIR)) $(call quoted,$(value QUERY))

TENSORBOARD := .build/tensorboard
$(TENSORBOARD)/.ready: requirements/tensorboard.txt | $(READY)
	@$(BIN)/python -m venv $(TENSORBOARD)
	@tools/progress.sh pip $(TENSORBOARD)/bin/python -m pip install -r $<
	@touch $@
tensorboard: $(TENSORBOARD)/.ready ## a run's curves in the browser: RUN=runs/quickstart
	@$(TENSORBOARD)/bin/tensorboard --logdir=$(call quoted,$(or $(value RUN),$(value OUTPUT_DIR)))

# Ranks and faults wait much: they run beside unit tests, which come last.
TESTS = $(BIN)/python -m pytest -q -n 3 --dist=worksteal tests/ranks tests/faults tests/unit tests/fuzz
test: lint ## lint, and all tests that are not slow: about ten minutes
	$(TESTS) -m 'not slow'
slow-test: $(READY) ## more modes, ranks and faults
	$(TESTS) -m slow

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY) ## speed of the training step here, a JSON line for each shape
	@for precision in fp32 bf16; do \
	  for shape in "base 8 128 20" "base 2 512 80" "mini 64 128 20"; do \
	    set -- $$shape; \
	    $(BIN)/python -m benchmarks.step \
	      --bert_config_file=configs/bert_$$1.json --train_batch_size=$$2 \
	      --max_seq_length=$$3 --max_predictions_per_seq=$$4 \
	      --precision=$$precision || exit 1; \
	  done; \
	done

format: $(READY) ## ruff writes the code in its style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# This needs a CUDA compiler, but no GPU.
horovod-gpu: $(READY) ## a wheel of Horovod with CUDA and NCCL in .build/
	xla_patches/build_horovod.sh gpu-wheel $(BIN)/python .build

INPUTS ?= 12000
SEED ?= 1
fuzz: $(READY) ## damaged input to all readers: INPUTS=12000 SEED=1
	FUZZ_INPUTS=$(INPUTS) FUZZ_SEED=$(SEED) $(BIN)/python -m pytest -q -n auto tests/fuzz

clean: ## removes .venv and .build
	rm -rf $(VENV) .build
