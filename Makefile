# make               build ./ling
# make quickstart    train, evaluate and draw a real small model on real text
# make test          everything that is tested, dependencies included
# make check-clang   compile everything with clang too, for its warnings
# make bench         training speed against the peak of the machine
# make install       ling, its manual page and its completion for bash into PREFIX (default: /usr/local), under DESTDIR if given; make uninstall
# make fuzz          fuzz each reader of foreign bytes for FUZZ_SECONDS each (clang)
# make clean

ifeq ($(origin CC),default)
CC := gcc
endif
CLANG ?= clang
# Fast-math is out: NaN and infinity must stay visible. The flags of RELEASE_FLAGS say that nobody reads errno or FP traps, and allow fused
# multiply-add.
OPTIMIZE ?= -O3 -march=native
# clang is told not to complain of a loop that it cannot vectorise (a maximum that must respect NaN).
WARNINGS := -Wall -Wextra -Wshadow -Werror -Wno-pass-failed
# What mpicc would add, so that any compiler can be used.
MPI_CFLAGS := $(shell pkg-config --cflags ompi-c 2>/dev/null)
MPI_LIBS := $(shell pkg-config --libs ompi-c 2>/dev/null)
COMMON := -std=c11 -g -I. -fopenmp $(WARNINGS) $(MPI_CFLAGS)
LIBS := $(MPI_LIBS) -lopenblas -lyaml -ljansson -lpcre2-8 -lutf8proc -lpng -lzstd -lz -ledit -lnlopt -lm

# What is not installed, of the packages that pkg-config knows. Empty when all is there; `make MISSING=` goes on without them.
missing = $(shell for p in $(1); do pkg-config --exists $$p 2>/dev/null || echo $$p; done)
MISSING := $(call missing,ompi-c openblas yaml-0.1 jansson libpcre2-8 libutf8proc libpng zlib libzstd libedit nlopt)
MISSING_FOR_TESTS := $(call missing,cmocka)

# Four builds of the same sources, each in a folder of BUILD: `release`; `double`, with real = double, which finite differences and tight
# comparisons need; `sanitize`, in which bad input, leaks and short runs are tested; and `fuzz`. The last two have blocks so small that
# a small file has many; in `sanitize` a rank that waits also says so soon.
BUILD := build
RELEASE_FLAGS := $(COMMON) $(OPTIMIZE) -fno-math-errno -fno-trapping-math -ffp-contract=fast
DOUBLE_FLAGS := $(RELEASE_FLAGS) -DLING_DOUBLE -DSHARD_TAGS=5 -DDUMP_BLOCK=1000
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
SMALL_BLOCKS := -DTEXT_BLOCK=512 -DSCAN_BLOCK=9 -DSEQUENCE_MAX=10000
SHORT_WAITS := -DNOTICE_SECONDS=0.5 -DREPORT_SECONDS=2
SANITIZE_FLAGS := $(COMMON) -O1 $(SANITIZERS) $(SMALL_BLOCKS) $(SHORT_WAITS)
FUZZ_FLAGS := $(COMMON) -O1 $(SANITIZERS) -fsanitize=fuzzer-no-link -DTEXT_BLOCK=64 -DSCAN_BLOCK=9 -DSEQUENCE_MAX=16
CLANG_FLAGS := $(COMMON) $(SMALL_BLOCKS) -fsyntax-only

SOURCES := $(wildcard *.c files/*.c model/*.c training/*.c commands/*.c)
TEST_SOURCES := $(wildcard tests/*.c)
LIBRARY := $(patsubst %.c,%.o,$(filter-out commands/main.c,$(SOURCES))) # all but main: what the tests link
RELEASE := $(LIBRARY:%=$(BUILD)/release/%)
DOUBLE := $(LIBRARY:%=$(BUILD)/double/%)
SANITIZE := $(LIBRARY:%=$(BUILD)/sanitize/%)
FUZZ := $(LIBRARY:%=$(BUILD)/fuzz/%)

.PHONY: all deps test-deps test run-tests check-clang quickstart bench fuzz install uninstall clean force
.SECONDARY:
.DELETE_ON_ERROR:
all: ling

ling: $(BUILD)/release/commands/main.o $(RELEASE)
	$(CC) $(RELEASE_FLAGS) $^ -o $@ $(LIBS)

# The compiler and flags of a build.
$(BUILD)/release/%: FLAGS = $(RELEASE_FLAGS)
$(BUILD)/double/%: FLAGS = $(DOUBLE_FLAGS)
$(BUILD)/sanitize/%: FLAGS = $(SANITIZE_FLAGS)
$(BUILD)/fuzz/%: FLAGS = $(FUZZ_FLAGS)
$(BUILD)/clang/%: FLAGS = $(CLANG_FLAGS)
$(BUILD)/fuzz/% $(BUILD)/clang/%: CC = $(CLANG)

# The file `flags` of a build holds them. It is written again when they are no longer those, and with it all objects of that build.
$(BUILD)/%/flags:
	@mkdir -p $(@D)
	@echo '$(strip $(CC) $(FLAGS) $(LIBS))' >$@

different = $(subst $(1),,$(2))$(subst $(2),,$(1))
remember = $(if $(call different,$(strip $(2) $(LIBS)),$(file <$(BUILD)/$(1)/flags)),$(eval $(BUILD)/$(1)/flags: force))
$(call remember,release,$(CC) $(RELEASE_FLAGS))
$(call remember,double,$(CC) $(DOUBLE_FLAGS))
$(call remember,sanitize,$(CC) $(SANITIZE_FLAGS))
$(call remember,fuzz,$(CLANG) $(FUZZ_FLAGS))
$(call remember,clang,$(CLANG) $(CLANG_FLAGS))

# Stops with one line where something is not installed. -MMD: the compiler writes beside an object the headers that it depends on.
define compile
$(if $(MISSING),$(error not installed: $(MISSING); run scripts/install-deps.sh))
$(if $(MISSING_FOR_TESTS),$(if $(filter tests/%,$<),$(error not installed: $(MISSING_FOR_TESTS); run scripts/install-deps.sh --tests)))
@mkdir -p $(@D)
$(CC) $(FLAGS) -MMD -MP -c $< -o $@
endef

$(BUILD)/release/%.o: %.c $(BUILD)/release/flags
	$(compile)
$(BUILD)/double/%.o: %.c $(BUILD)/double/flags
	$(compile)
$(BUILD)/sanitize/%.o: %.c $(BUILD)/sanitize/flags
	$(compile)
$(BUILD)/fuzz/%.o: %.c $(BUILD)/fuzz/flags
	$(compile)

# The assembler puts the page into the object (.incbin), which is no header that -MMD sees.
$(foreach b,release double sanitize fuzz,$(BUILD)/$(b)/commands/report.o): commands/report_page.html

-include $(wildcard $(BUILD)/*/*.d $(BUILD)/*/*/*.d)

# ---- tests ----

# tests/test_*.c are programs, each linked with one of the builds, and tests/test_*.sh scripts, which run TEST_TOOLS.
RELEASE_TESTS := $(addprefix $(BUILD)/,test_kernels test_model test_moe)
DOUBLE_TESTS := $(addprefix $(BUILD)/,test_kernels_double test_model_double test_mtp_double test_dump_double)
SANITIZE_TESTS := $(filter-out $(RELEASE_TESTS) $(BUILD)/test_parallel,$(patsubst tests/%.c,$(BUILD)/%,$(wildcard tests/test_*.c)))
TEST_PROGRAMS := $(RELEASE_TESTS) $(DOUBLE_TESTS) $(SANITIZE_TESTS)
TEST_TOOLS := $(addprefix $(BUILD)/,sanitize/ling ling_double test_parallel compare_checkpoints measure_inference compare_checkpoints_double train_sgd_double log_files.so faults.so)
# What tests/run.sh runs, the longest first. The number behind a colon is of cores.
LONG_TESTS := tests/test_parallel.sh:8 tests/test_local.sh:4 tests/test_plan.sh:4 tests/test_waiting.sh:3 tests/test_supervise.sh:3 tests/test_sweep.sh:2 tests/test_faults.sh:3 tests/test_spikes.sh:3 tests/test_saves.sh:3 tests/test_trace.sh:3 tests/test_align.sh:4 tests/test_dump.sh:4 tests/test_samples.sh:4 tests/test_replicas.sh:4 tests/test_watch.sh:2 tests/test_cli.sh tests/test_generate.sh tests/test_chat.sh tests/test_convert.sh tests/test_tasks.sh
SHORT_TESTS := $(filter-out $(foreach t,$(LONG_TESTS),$(firstword $(subst :, ,$t))),$(wildcard tests/test_*.sh))

$(RELEASE_TESTS) $(addprefix $(BUILD)/,test_parallel compare_checkpoints measure_inference): $(BUILD)/%: $(BUILD)/release/tests/%.o $(RELEASE)
	$(CC) $(RELEASE_FLAGS) $^ -o $@ -lcmocka $(LIBS)

$(DOUBLE_TESTS) $(addprefix $(BUILD)/,compare_checkpoints_double train_sgd_double): $(BUILD)/%_double: $(BUILD)/double/tests/%.o $(DOUBLE)
	$(CC) $(DOUBLE_FLAGS) $^ -o $@ -lcmocka $(LIBS)

$(SANITIZE_TESTS): $(BUILD)/%: $(BUILD)/sanitize/tests/%.o $(SANITIZE)
	$(CC) $(SANITIZE_FLAGS) $^ -o $@ -lcmocka $(LIBS)

# It spoils products (see there).
$(BUILD)/test_products: private LIBS += -Wl,--wrap=single_gemm

$(BUILD)/sanitize/ling: $(BUILD)/sanitize/commands/main.o $(SANITIZE)
	$(CC) $(SANITIZE_FLAGS) $^ -o $@ $(LIBS)

$(BUILD)/ling_double: $(BUILD)/double/commands/main.o $(DOUBLE)
	$(CC) $(DOUBLE_FLAGS) $^ -o $@ $(LIBS)

$(addprefix $(BUILD)/,log_files.so faults.so): $(BUILD)/%.so: tests/%.c
	@mkdir -p $(@D)
	$(CC) -std=c11 -g $(WARNINGS) -shared -fPIC $< -o $@ -ldl

deps:
	scripts/install-deps.sh

test-deps:
	scripts/install-deps.sh --tests

test: test-deps
	$(MAKE) --no-print-directory $(if $(findstring -j,$(MAKEFLAGS)),,-j$$(nproc)) run-tests

run-tests: ling $(TEST_PROGRAMS) $(TEST_TOOLS)
	tests/run.sh $(LONG_TESTS) $(TEST_PROGRAMS) $(SHORT_TESTS)

# clang's view of every source and test: errors and warnings, no code. What passed is not looked at again until it changes.
$(BUILD)/clang/%.passed: %.c $(BUILD)/clang/flags
	@mkdir -p $(@D)
	$(CC) $(FLAGS) -MMD -MP -MT $@ -MF $(@:.passed=.d) $<
	@touch $@

check-clang: $(patsubst %.c,$(BUILD)/clang/%.passed,$(SOURCES) $(TEST_SOURCES))

quickstart: deps
	scripts/quickstart.sh

bench: ling
	./ling bench configs/bench.yaml
	./ling bench configs/bench.yaml data.seq_len=4096 train.batch=2 train.micro_batch=2

# ---- fuzzing ----

FUZZERS := $(patsubst tests/fuzz_%.c,%,$(wildcard tests/fuzz_*.c))
FUZZ_SECONDS ?= 60

$(BUILD)/fuzz_%: $(BUILD)/fuzz/tests/fuzz_%.o $(FUZZ)
	$(CLANG) $(FUZZ_FLAGS) -fsanitize=fuzzer $^ -o $@ $(LIBS)

fuzz: $(FUZZERS:%=$(BUILD)/fuzz_%) # -close_fd_mask=2: progress and notes are no findings
	for f in $(FUZZERS); do mkdir -p $(BUILD)/fuzz/corpus-$$f && \
		$(BUILD)/fuzz_$$f -max_total_time=$(FUZZ_SECONDS) -timeout=10 -close_fd_mask=2 $(BUILD)/fuzz/corpus-$$f || exit 1; done

# ---- installation ----

# -march=native makes a program for this processor; OPTIMIZE="-O3 -march=x86-64-v3" one for any with AVX2.
PREFIX ?= /usr/local
BIN := $(DESTDIR)$(PREFIX)/bin
MAN := $(DESTDIR)$(PREFIX)/share/man/man1
COMPLETIONS := $(DESTDIR)$(PREFIX)/share/bash-completion/completions

install: ling
	./ling --man >$(BUILD)/ling.1
	./ling --completion >$(BUILD)/ling.bash
	install -d "$(BIN)" "$(MAN)" "$(COMPLETIONS)"
	install -m 755 ling "$(BIN)/ling"
	install -m 644 $(BUILD)/ling.1 "$(MAN)/ling.1"
	install -m 644 $(BUILD)/ling.bash "$(COMPLETIONS)/ling"

uninstall:
	rm -f "$(BIN)/ling" "$(MAN)/ling.1" "$(COMPLETIONS)/ling"

clean:
	rm -rf $(BUILD) ling
