# make             build ./ling
# make quickstart  train, evaluate and draw a real small model on real text
# make test        everything that is tested, dependencies included
# make bench       training speed against the roof of the machine
# make fuzz        fuzz each reader of foreign bytes for FUZZ_SECONDS each (clang)

ifeq ($(origin CC),default)
CC := gcc
endif
# Fast-math is out: NaN and infinity must stay visible. The flags below say that nobody reads errno or FP traps, and allow fused
# multiply-add.
OPTIMIZE ?= -O3 -march=native
# clang is told not to complain of a loop that it cannot vectorise (a maximum that must respect NaN).
WARNINGS := -Wall -Wextra -Werror -Wno-pass-failed
# What mpicc would add, so that any compiler can be used.
MPI_CFLAGS = $(shell pkg-config --cflags ompi-c)
MPI_LIBS = $(shell pkg-config --libs ompi-c)
CFLAGS = -std=c11 $(OPTIMIZE) -g -fno-math-errno -fno-trapping-math -ffp-contract=fast -fopenmp $(WARNINGS) $(MPI_CFLAGS)
SANITIZE = -std=c11 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -fopenmp $(WARNINGS) $(MPI_CFLAGS)
LIBS = $(MPI_LIBS) -lopenblas -lyaml -ljansson -lpcre2-8 -lutf8proc -lpng -lz -lm
SOURCES := ling.c kernels.c parallel.c data.c
TEST_PROGRAMS := build/test_kernels build/test_kernels_double build/test_model build/test_model_double \
	build/test_config build/test_files build/test_tokenizer build/test_convert build/test_tasks build/test_plot
FUZZERS := config safetensors gguf tokens jsonl tokenizer tasks
FUZZ_SECONDS ?= 60

ling: $(SOURCES:%.c=build/release/%.o)
	$(CC) $(CFLAGS) $^ -o $@ $(LIBS)

build/release build/double build/sanitize build/fuzz:
	mkdir -p $@

build/release/%.o: %.c ling.h | build/release
	$(CC) $(CFLAGS) -c $< -o $@

# The same source with real = double: what finite differences and tight comparisons are made with.
build/double/%.o: %.c ling.h | build/double
	$(CC) $(CFLAGS) -DLING_DOUBLE -c $< -o $@

# Bad input, leaks and short training runs are tested with sanitizers.
build/sanitize/%.o: %.c ling.h | build/sanitize
	$(CC) $(SANITIZE) -c $< -o $@

build/sanitize/ling: $(SOURCES:%.c=build/sanitize/%.o)
	$(CC) $(SANITIZE) $^ -o $@ $(LIBS)

# ---- tests: programs link the sources less main(), or include data.c to reach its static functions ----

build/test_kernels: tests/test_kernels.c tests/test.h build/release/kernels.o
	$(CC) $(CFLAGS) $< build/release/kernels.o -o $@ -lcmocka $(LIBS)

build/test_kernels_double: tests/test_kernels.c tests/test.h build/double/kernels.o
	$(CC) $(CFLAGS) -DLING_DOUBLE $< build/double/kernels.o -o $@ -lcmocka $(LIBS)

build/test_model: tests/test_model.c tests/test.h $(SOURCES:%.c=build/release/%.o)
	$(CC) $(CFLAGS) -Dmain=ling_main -c ling.c -o build/release/ling_library.o
	$(CC) $(CFLAGS) $< build/release/ling_library.o $(filter-out %/ling.o,$(filter %.o,$^)) -o $@ -lcmocka $(LIBS)

build/test_model_double: tests/test_model.c tests/test.h $(SOURCES:%.c=build/double/%.o)
	$(CC) $(CFLAGS) -DLING_DOUBLE -Dmain=ling_main -c ling.c -o build/double/ling_library.o
	$(CC) $(CFLAGS) -DLING_DOUBLE $< build/double/ling_library.o $(filter-out %/ling.o,$(filter %.o,$^)) -o $@ -lcmocka $(LIBS)

build/test_parallel: tests/test_parallel.c build/test_model
	$(CC) $(CFLAGS) $< build/release/ling_library.o build/release/kernels.o build/release/parallel.o build/release/data.o -o $@ $(LIBS)

build/compare_checkpoints: tests/compare_checkpoints.c data.c ling.h
	$(CC) $(CFLAGS) -Wno-unused-function $< -o $@ $(LIBS)

# The same two in double, in which layouts differ by nothing but errors.
build/ling_double: $(SOURCES:%.c=build/double/%.o)
	$(CC) $(CFLAGS) $^ -o $@ $(LIBS)

build/compare_checkpoints_double: tests/compare_checkpoints.c data.c ling.h
	$(CC) $(CFLAGS) -DLING_DOUBLE -Wno-unused-function $< -o $@ $(LIBS)

build/test_config build/test_files build/test_plot build/test_tokenizer build/test_convert: build/%: tests/%.c tests/test.h data.c ling.h | build/sanitize
	$(CC) $(SANITIZE) -Wno-unused-function $< -o $@ -lcmocka $(LIBS)

build/test_tasks: tests/test_tasks.c tests/test.h data.c ling.h $(SOURCES:%.c=build/sanitize/%.o)
	$(CC) $(SANITIZE) -Dmain=ling_main -c ling.c -o build/sanitize/ling_library.o
	$(CC) $(SANITIZE) -Wno-unused-function $< $(addprefix build/sanitize/,ling_library.o kernels.o parallel.o) -o $@ -lcmocka $(LIBS)

.PHONY: deps test run-tests quickstart bench fuzz clean

deps:
	scripts/install-deps.sh

test: deps
	$(MAKE) --no-print-directory run-tests

run-tests: ling build/sanitize/ling $(TEST_PROGRAMS) build/test_parallel build/compare_checkpoints build/ling_double build/compare_checkpoints_double
	tests/run.sh $(TEST_PROGRAMS) tests/test_cli.sh tests/test_convert.sh tests/test_generate.sh tests/test_tasks.sh tests/test_parallel.sh tests/test_plan.sh

quickstart: deps
	scripts/quickstart.sh

bench: ling
	./ling bench configs/bench.yaml
	./ling bench configs/bench.yaml data.seq_len=4096 train.batch=2 train.micro_batch=2

# ---- fuzzing ----

build/fuzz/%: tests/fuzz_%.c data.c ling.h | build/fuzz
	clang -std=c11 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Wno-unused-function $< -o $@ $(LIBS)

fuzz: $(FUZZERS:%=build/fuzz/%) # -close_fd_mask=2: progress and notes are no findings
	for f in $(FUZZERS); do mkdir -p build/fuzz/corpus-$$f && \
		build/fuzz/$$f -max_total_time=$(FUZZ_SECONDS) -timeout=10 -close_fd_mask=2 build/fuzz/corpus-$$f || exit 1; done

clean:
	rm -rf build ling
