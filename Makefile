# make             build ./ling
# make quickstart  train, evaluate and draw a real small model on real text
# make test        everything that is tested, dependencies included
# make bench       training speed against the peak of the machine
# make fuzz        fuzz each reader of foreign bytes for FUZZ_SECONDS each (clang)

ifeq ($(origin CC),default)
CC := gcc
endif
# Fast-math is out: NaN and infinity must stay visible. The flags below say that nobody reads errno or FP traps, and allow fused
# multiply-add.
OPTIMIZE ?= -O3 -march=native
# clang is told not to complain of a loop that it cannot vectorise (a maximum that must respect NaN).
WARNINGS := -Wall -Wextra -Wshadow -Werror -Wno-pass-failed
# What mpicc would add, so that any compiler can be used.
MPI_CFLAGS := $(shell pkg-config --cflags ompi-c 2>/dev/null)
MPI_LIBS := $(shell pkg-config --libs ompi-c 2>/dev/null)
COMMON := -std=c11 -g -I. -fopenmp $(WARNINGS) $(MPI_CFLAGS)
LIBS := $(MPI_LIBS) -lopenblas -lyaml -ljansson -lpcre2-8 -lutf8proc -lpng -lz -lm

# Four builds of the same sources, each in a folder of BUILD: `release`; `double`, with real = double, which finite differences and tight
# comparisons need; `sanitize`, in which bad input, leaks and short runs are tested, with blocks so small that a small file has many; and
# `fuzz`.
BUILD ?= build
RELEASE_FLAGS := $(COMMON) $(OPTIMIZE) -fno-math-errno -fno-trapping-math -ffp-contract=fast
DOUBLE_FLAGS := $(RELEASE_FLAGS) -DLING_DOUBLE -DCHECKPOINT_TAGS=5
SMALL_BLOCKS := -DTEXT_BLOCK=512 -DSCAN_BLOCK=9 -DSEQUENCE_MAX=10000
SANITIZE_FLAGS := $(COMMON) -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer $(SMALL_BLOCKS)
FUZZ_FLAGS := $(COMMON) -O1 -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all $(SMALL_BLOCKS)

SOURCES := $(wildcard *.c files/*.c commands/*.c)
LIBRARY := $(patsubst %.c,%.o,$(filter-out commands/main.c,$(SOURCES))) # all but main: what the tests link
RELEASE := $(LIBRARY:%=$(BUILD)/release/%)
DOUBLE := $(LIBRARY:%=$(BUILD)/double/%)
SANITIZE := $(LIBRARY:%=$(BUILD)/sanitize/%)

TEST_PROGRAMS := $(addprefix $(BUILD)/,test_kernels test_kernels_double test_model test_model_double test_config test_base test_files test_tokenizer \
	test_convert test_tasks test_plot test_moe)
TEST_SCRIPTS := $(addprefix tests/,test_docs.sh test_cli.sh test_convert.sh test_generate.sh test_tasks.sh test_parallel.sh test_plan.sh)
TEST_TOOLS := $(addprefix $(BUILD)/,sanitize/ling ling_double test_parallel compare_checkpoints compare_checkpoints_double)
FUZZERS := config safetensors gguf tokens jsonl tokenizer tasks
FUZZ_SECONDS ?= 60

.PHONY: all deps test run-tests quickstart bench fuzz clean
.SECONDARY:
all: ling

ling: $(BUILD)/release/commands/main.o $(RELEASE)
	$(CC) $(RELEASE_FLAGS) $^ -o $@ $(LIBS)

# -MMD: the compiler writes beside each object the headers that it depends on.
$(BUILD)/release/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(RELEASE_FLAGS) -MMD -MP -c $< -o $@

$(BUILD)/double/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(DOUBLE_FLAGS) -MMD -MP -c $< -o $@

$(BUILD)/sanitize/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(SANITIZE_FLAGS) -MMD -MP -c $< -o $@

$(BUILD)/fuzz/%.o: %.c
	@mkdir -p $(@D)
	clang $(FUZZ_FLAGS) -MMD -MP -c $< -o $@

-include $(wildcard $(BUILD)/*/*.d $(BUILD)/*/*/*.d)

# ---- tests ----

$(addprefix $(BUILD)/,test_kernels test_model test_moe test_parallel compare_checkpoints): $(BUILD)/%: $(BUILD)/release/tests/%.o $(RELEASE)
	$(CC) $(RELEASE_FLAGS) $^ -o $@ -lcmocka $(LIBS)

$(addprefix $(BUILD)/,test_kernels_double test_model_double compare_checkpoints_double): $(BUILD)/%_double: $(BUILD)/double/tests/%.o $(DOUBLE)
	$(CC) $(DOUBLE_FLAGS) $^ -o $@ -lcmocka $(LIBS)

$(addprefix $(BUILD)/,test_config test_base test_files test_tokenizer test_convert test_tasks test_plot): $(BUILD)/%: $(BUILD)/sanitize/tests/%.o $(SANITIZE)
	$(CC) $(SANITIZE_FLAGS) $^ -o $@ -lcmocka $(LIBS)

$(BUILD)/sanitize/ling: $(BUILD)/sanitize/commands/main.o $(SANITIZE)
	$(CC) $(SANITIZE_FLAGS) $^ -o $@ $(LIBS)

$(BUILD)/ling_double: $(BUILD)/double/commands/main.o $(DOUBLE)
	$(CC) $(DOUBLE_FLAGS) $^ -o $@ $(LIBS)

deps:
	scripts/install-deps.sh

test: deps
	$(MAKE) --no-print-directory run-tests

run-tests: ling $(TEST_PROGRAMS) $(TEST_TOOLS)
	tests/run.sh $(TEST_PROGRAMS) $(TEST_SCRIPTS)

quickstart: deps
	scripts/quickstart.sh

bench: ling
	./ling bench configs/bench.yaml
	./ling bench configs/bench.yaml data.seq_len=4096 train.batch=2 train.micro_batch=2

# ---- fuzzing ----

$(BUILD)/fuzz_%: $(BUILD)/fuzz/tests/fuzz_%.o $(LIBRARY:%=$(BUILD)/fuzz/%)
	clang $(FUZZ_FLAGS) -fsanitize=fuzzer $^ -o $@ $(LIBS)

fuzz: $(FUZZERS:%=$(BUILD)/fuzz_%) # -close_fd_mask=2: progress and notes are no findings
	for f in $(FUZZERS); do mkdir -p $(BUILD)/fuzz/corpus-$$f && \
		$(BUILD)/fuzz_$$f -max_total_time=$(FUZZ_SECONDS) -timeout=10 -close_fd_mask=2 $(BUILD)/fuzz/corpus-$$f || exit 1; done

clean:
	rm -rf build ling
