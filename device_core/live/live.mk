# make live | live-sanitized: the library for live rounds, its example, and the same under sanitizers. They need libcurl
# and OpenSSL 3 with headers (Debian: libcurl4-openssl-dev, libssl-dev). CPATH and LIBRARY_PATH name other places.
LIVE_SOURCES := $(sort $(wildcard live/*.c))
LIVE_OBJECTS := $(LIVE_SOURCES:live/%.c=$(OUT)/objects/live/%.o)
LIVE_LIBS ?= -lcurl -lcrypto
LIVE_NAME := $(subst device,live,$(NAME))

live: $(OUT)/$(LIVE_NAME) $(OUT)/libtfpfl_live.a $(OUT)/live

$(OUT)/objects/live/%.o: live/%.c $(wildcard live/*.h) $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -Isrc -c -o $@ $<

# The core is in both.
$(OUT)/$(LIVE_NAME): $(LIVE_OBJECTS) $(OBJECTS)
	$(CC) $(SHARED) $(STRIP) $(FLAGS) $(LIVE_OBJECTS) $(OBJECTS) $(LIVE_LIBS) -lm -ldl
	$(LINK)

$(OUT)/libtfpfl_live.a: $(LIVE_OBJECTS) $(OBJECTS)
	rm -f $@
	$(AR) rcs $@ $(LIVE_OBJECTS) $(OBJECTS)

$(OUT)/live: examples/live.c $(OUT)/libtfpfl_live.a
	$(CC) $(CFLAGS) -o $@ $< $(OUT)/libtfpfl_live.a $(LIVE_LIBS) -lm -ldl

# What the tests run besides.
live-programs: live $(OUT)/secure_vectors $(OUT)/own_clock/$(LIVE_NAME)

$(OUT)/secure_vectors: tests/secure_vectors.c $(OUT)/libtfpfl_live.a
	$(CC) $(CFLAGS) -Isrc -Ilive -o $@ $< $(OUT)/libtfpfl_live.a $(LIVE_LIBS) -lm -ldl

$(OUT)/own_clock/$(LIVE_NAME): tests/own_clock.c $(LIVE_OBJECTS) $(OBJECTS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -Isrc -Ilive -shared -o $@ $< $(filter-out %/pause.o,$(LIVE_OBJECTS)) $(OBJECTS) $(LIVE_LIBS) -lm -ldl

live-sanitized: FLAGS += -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
live-sanitized: $(OUT)/live $(OUT)/secure_vectors

.PHONY: live live-programs live-sanitized
