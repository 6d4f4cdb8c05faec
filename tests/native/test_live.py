"""Devices in C take part in live rounds as those in Python do, and are as careful about what is counted."""

import hashlib
import json
import re
import signal
import ssl
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from pathlib import Path
from threading import Timer

import numpy as np
import pytest
import tensorflow as tf

from helpers import phones
from helpers.certificates import made_certificate
from helpers.live import examples_of, in_threads, live_theta, new_run, same_scores, serving, simulated
from helpers.marks import slow_but
from helpers.native import CORE, NativeError, linked
from helpers.native_live import Lost, NativeLive, Proxy, live_programs, missing, write_raw
from tflite_export.device.errors import InvalidInput
from tflite_export.device.head_file import head_bytes, load_head
from tflite_export.device.live.client import LiveDevice
from tflite_export.device.runtime import Bundle
from tfpfl.live.rules import Rules

ROUNDS = 4
pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return phones.federation(tmp_path_factory.mktemp("federation") / "digits")


@pytest.fixture(scope="module")
def kept_bundles(tmp_path_factory):
    return tmp_path_factory.mktemp("bundles") / "bundles"


@pytest.fixture
def run(federation, kept_bundles, tmp_path):
    with new_run(federation, tmp_path / "run", kept_bundles) as run:
        yield run


@pytest.fixture(scope="module")
def live(litert_library):
    """The folder with the library and the example."""
    return live_programs()


@pytest.fixture(scope="module", params=slow_but(["usual", "sanitized"], "usual"))
def any_live(request, litert_library):
    """The same; also with sanitizers of addresses, leaks and undefined behaviour."""
    return live_programs(sanitized=request.param == "sanitized")


def started(folder, url, tmp_path, client, token, litert, **how):
    """A process of the example."""
    command = [folder / "live", url, tmp_path / f"data{client}", tmp_path / f"device{client}", litert, token]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)


def head_of(tmp_path, run, client):
    """The head that a device has kept."""
    classes = int(run.population.info(client).num_classes)
    return load_head(tmp_path / f"device{client}" / "head.bin", 200, classes)


def same_rounds(run, tmp_path, expected):
    """Theta, all heads and the number of updates are those of the simulation."""
    theta, heads, _ = expected
    assert run.store.round_num == ROUNDS
    assert np.abs(live_theta(run) - theta).max() < 1e-5
    for client, head in heads.items():
        for found, wanted in zip(head_of(tmp_path, run, client), head, strict=False):
            assert np.abs(found - np.asarray(wanted)).max() < 1e-5
    for folder in tmp_path.glob("device*"):
        assert not [path for path in folder.iterdir() if path.name.endswith(".new") or path.name.startswith("update")]


def mixed(run, live, litert, tmp_path, url, tokens):
    """Every second client is a process in C, the others are devices in Python: {client: what it said}."""
    said = {}

    def in_c(client):
        write_raw(tmp_path / f"data{client}", examples_of(run, client))
        with started(live, url, tmp_path, client, tokens[client], litert) as process:
            said[client], error = process.communicate()
        assert process.returncode == 0, error

    def in_python(client):
        given = examples_of(run, client), tokens[client]
        device = LiveDevice(url, tmp_path / f"device{client}", *given, interpreter=tf.lite.Interpreter)
        said[client] = f"{device.run()} updates were counted\n"

    ids = run.population.client_ids.tolist()
    in_threads([lambda i=i: (in_c if i % 2 else in_python)(i) for i in ids])
    return said


@pytest.mark.slow
def test_devices_in_c_and_in_python_are_the_simulation(run, any_live, litert_library, tmp_path):
    expected = simulated(run, ROUNDS)
    with serving(run, Rules(wait_for=10)) as (address, rounds, tokens):
        said = mixed(run, any_live, litert_library, tmp_path, address, tokens)
        arrived = Counter(event[-1] for event in rounds.book.events() if event[2] == "arrived")
    same_rounds(run, tmp_path, expected)
    same_scores(run.store.evaluations(), expected[-1])
    assert sum(arrived.values()) == 5 * ROUNDS and sum(arrived[i] for i in (1, 3, 5, 7, 9)) > 5
    for client, text in said.items():
        assert text.endswith(f"{arrived[client]} updates were counted\n")
    assert said[1].startswith("joined as client 1\n") and said[1].count(": counted\n") == arrived[1]


@pytest.mark.slow
def test_a_server_that_is_away_for_a_while(run, live, litert_library, tmp_path):
    """It is stopped in the middle and started again; devices in C and in Python wait for it, and sign anew."""
    expected = simulated(run, ROUNDS)
    rules = Rules(wait_for=10)
    with Proxy() as proxy:

        def servers():
            with serving(run, rules) as (proxy.target, rounds, found):
                tokens.update(found)
                ready.set()
                while rounds.view.round_num < 2:
                    time.sleep(0.01)
                proxy.target = None
            time.sleep(1)
            with serving(run, rules) as (proxy.target, rounds, _):
                over.wait(300)

        tokens, ready, over = {}, threading.Event(), threading.Event()
        thread = threading.Thread(target=servers)
        thread.start()
        try:
            assert ready.wait(60)
            said = mixed(run, live, litert_library, tmp_path, proxy.address, tokens)
        finally:
            over.set()
            thread.join()
    same_rounds(run, tmp_path, expected)
    same_scores(run.store.evaluations(), expected[-1])
    assert sum(int(text.splitlines()[-1].split()[0]) for text in said.values()) == 5 * ROUNDS


@pytest.mark.slow
def test_processes_that_are_killed_lose_nothing_and_nothing_counts_twice(run, live, litert_library, tmp_path):
    """kill -9 at random moments after the start, before the server has an update, when it has counted it, and while the
    device makes its head current."""
    expected, ids = simulated(run, ROUNDS), run.population.client_ids.tolist()
    rng, killed, processes = np.random.default_rng(0), Counter(), {}
    left = {i: list(rng.permutation(["before", "after", "told"])[:2]) for i in ids}

    def hook(when, method, path, client):
        if not path.startswith("/v1/update") or not left[client] or left[client][-1] != when:
            return
        left[client].pop()
        if when == "told":
            time.sleep(float(rng.uniform(0, 0.004)))
        processes[client].kill()
        killed[when] += 1
        raise Lost

    with Proxy(hook) as proxy, serving(run, Rules(wait_for=10, joins=100)) as (proxy.target, rounds, tokens):

        def work(client):
            write_raw(tmp_path / f"data{client}", examples_of(run, client))
            early = client % 2 == 0
            while True:
                processes[client] = started(live, proxy.address, tmp_path, client, tokens[client], litert_library)
                if early:
                    time.sleep(float(rng.uniform(0, 1)))
                    processes[client].kill()
                    killed["early"] += 1
                    early = False
                _, error = processes[client].communicate()
                if processes[client].returncode != -9:
                    break
            assert processes[client].returncode == 0, error

        in_threads([lambda i=i: work(i) for i in ids])
        arrived = [event[-2:] for event in rounds.book.events() if event[2] == "arrived"]
    assert len(arrived) == len(set(arrived)) == 5 * ROUNDS
    assert sum(killed.values()) >= 15 and all(killed[when] for when in ("early", "before", "after", "told")), killed
    same_rounds(run, tmp_path, expected)
    same_scores(run.store.evaluations(), expected[-1])


@pytest.mark.slow
def test_an_update_that_comes_too_late_leaves_the_old_head(run, live, litert_library, tmp_path):
    """The device computes its update, and it reaches the server when the round is over without it."""
    ids, late, said, away = run.population.client_ids.tolist(), threading.Event(), {}, [0.0]

    def hook(when, method, path, client):
        if path == "/v1/update/1" and client == chosen and when == "before" and not late.is_set():
            computed.set()
            raise Lost
        if client == chosen and late.is_set() and path.startswith("/v1/work"):
            answered.set()
            raise Lost

    chosen, computed, answered = -1, threading.Event(), threading.Event()
    rules = Rules(wait_for=len(ids), quorum=0.2)
    clock = lambda: time.time() + away[0]  # noqa: E731
    with Proxy(hook) as proxy, serving(run, rules, clock) as (proxy.target, rounds, tokens):
        devices = {}
        for i in ids:
            given = examples_of(run, i), tokens[i], litert_library
            devices[i] = NativeLive(live, proxy.address, tmp_path / f"device{i}", *given, patience=120.0)
        assert rounds.view.kind == "visit"
        chosen = min(rounds.view.waiting)
        first = (tmp_path / f"device{chosen}" / "head.bin").read_bytes()
        others = sorted(rounds.view.waiting - {chosen})

        def work():
            try:
                devices[chosen].step()
                devices[chosen].step()
            except NativeError as error:
                said["error"] = str(error)

        thread = threading.Thread(target=work)
        thread.start()
        assert computed.wait(60)
        for i in others:
            assert devices[i].step()
        away[0] = 61.0  # the deadline is over
        while rounds.view.kind == "visit" and rounds.view.round_num == 1:
            time.sleep(0.01)
        late.set()
        assert answered.wait(60)
        head = (tmp_path / f"device{chosen}" / "head.bin").read_bytes()
        pending = (tmp_path / f"device{chosen}" / "update.bin").exists()
        late.clear()
        chosen_told = devices[chosen].told
        chosen = -1
        thread.join()
        for device in devices.values():
            device.close()
    why = "round 1: not counted: round 1 is over, and this update was not counted"
    assert chosen_told[1:] == [why] and head == first and not pending and not said


def in_python(url, state, examples, token, patience=-1.0):
    return LiveDevice(url, state, examples, token, interpreter=tf.lite.Interpreter, patience=patience)


def test_a_folder_of_one_language_goes_on_in_the_other(run, live, litert_library, tmp_path):
    """Key, number, bundle and head are the same files. What is on its way must be sent by whom it was computed."""
    c, python = (lambda *given, token: NativeLive(live, *given, token, litert_library)), in_python
    with serving(run, Rules(wait_for=10)) as (address, _, tokens):
        for client, first, second in ((0, c, python), (1, python, c)):
            given = address, tmp_path / f"device{client}", examples_of(run, client)
            begun = first(*given, token=tokens[client])
            head = (tmp_path / f"device{client}" / "head.bin").read_bytes()
            assert first is python or head_bytes(begun.head) == head
            begun.close()
            gone_on = second(*given, token=None)
            gone_on.step(0.0)
            assert (tmp_path / f"device{client}" / "head.bin").read_bytes() == head
            gone_on.close()
            on_its_way = {"update.npz": c, "update.bin": python, "secure/visit.npz": c, "secure/update.bin": python}
            for name, other in on_its_way.items():
                path = tmp_path / f"device{client}" / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(b"on its way")
                with pytest.raises(InvalidInput, match=f"device{client}/{name} is an update that the client in"):
                    other(*given, token=None)
                path.unlink()
        path = tmp_path / "device1" / "update.bin"
        shape = load_head(path.with_name("head.bin"), 200, 3).kernel.shape
        never_written = b"TFPFLU01", b"TFPFLU02" + bytes(3000), damaged(1, 1, 0, 3000), damaged(*shape, 2**32 - 1, 3000)
        for content in never_written:  # and so never sent
            path.write_bytes(content)
            c(address, path.parent, examples_of(run, 1), token=None).close()
            assert not path.exists()


def damaged(m, k, names, size):
    """An update.bin whose checksum is right, and whose sizes are not."""
    rest = struct.pack("<IIII", 1, m, k, names) + bytes(32 + size)
    return b"TFPFLU01" + struct.pack("<I", zlib.crc32(rest)) + rest


@pytest.mark.slow
def test_what_goes_wrong_is_told(run, live, litert_library, tmp_path):
    good = examples_of(run, 0)
    x, y = good["train"]
    with serving(run, Rules(wait_for=10)) as (address, _, tokens):

        def refused(why, url=address, state="new", examples=good, token=None, alike=True):
            with pytest.raises(NativeError) as found:
                NativeLive(live, url, tmp_path / state, examples, token, litert_library).close()
            assert why in str(found.value)
            if alike:
                with pytest.raises(InvalidInput) as expected:
                    in_python(url, tmp_path / state, examples, token)
                assert str(found.value) == str(expected.value)

        refused("the server refused (401): this token is unknown: ask for one", token='no "token"')
        refused("new has not joined yet: give the enrolment token")
        refused("the server's address begins with http:// or https://, found 'ftp://a'", "ftp://a", token=tokens[0])
        refused("a device needs training examples", examples={"train": (x[:0], y[:0])}, token=tokens[0])
        less = good | {"train": (x[1:], y[1:])}
        refused(
            f"(409): client 0 has {len(x)} examples in this run, and the device {len(x) - 1}",
            examples=less,
            token=tokens[0],
        )
        refused("http://127.0.0.1:9 does not answer: ", "http://127.0.0.1:9", token=tokens[0], alike=False)
        refused("https://127.0.0.1:9 does not answer: ", "https://127.0.0.1:9", token=tokens[0], alike=False)
        (tmp_path / "a file").touch()
        refused("Not a directory: ", state="a file/new", alike=False)

        device = NativeLive(live, address, tmp_path / "device0", good, tokens[0], litert_library)
        device.close()
        assert device.told == ["joined as client 0"]
        assert (tmp_path / "device0" / "identity.pem").stat().st_mode & 0o777 == 0o600
        worse = good | {"test": (good["test"][0], good["test"][1] + 9)}
        refused(
            "the examples of test: label 9 is out of range: this client's are 0..1", state="device0", examples=worse
        )
        worse = good | {"validation": (np.where(np.arange(len(x)) == 1, np.nan, x.T).T.astype(np.float32), y)}
        refused("the examples of validation: example 1 holds NaN or infinity", state="device0", examples=worse)
        write_raw(tmp_path / "data0", good)
        with started(live, address, tmp_path, 0, "", litert_library) as process:
            try:
                until = time.monotonic() + 60
                while not any("device0/lock" in line for line in open_files(process.pid)) and time.monotonic() < until:
                    time.sleep(0.01)
                time.sleep(0.1)
                refused("device0 is in use: another device works with it", state="device0")
            finally:
                process.kill()
        (tmp_path / "device0" / "member.json").write_text('{"client": "0"}')
        refused("member.json is damaged: delete it, and join again with the token", state="device0")
        (tmp_path / "device0" / "identity.pem").write_text("no key")
        refused("identity.pem is damaged: delete it and member.json, and join again with the token", state="device0")
        (tmp_path / "device0" / "identity.pem").write_bytes(locked_key())
        refused("identity.pem is damaged: delete it and member.json, and join again with the token", state="device0")
        (tmp_path / "device0" / "identity.pem").write_bytes(other_key())
        refused("identity.pem is not a key of the curve P-256", state="device0")


def test_https_is_checked(run, live, litert_library, tmp_path):
    certificate = made_certificate(tmp_path / "both.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    given = tmp_path / "device0", examples_of(run, 0)
    with Proxy(tls=context) as proxy, serving(run, Rules(wait_for=10)) as (proxy.target, _, tokens):
        with pytest.raises(NativeError, match="^https://127.0.0.1.* does not answer: SSL certificate problem: "):
            NativeLive(live, proxy.address, *given, tokens[0], litert_library, patience=300.0)
        with pytest.raises(NativeError, match="nowhere.pem"):
            NativeLive(live, proxy.address, *given, tokens[0], litert_library, 300.0, tmp_path / "nowhere.pem")
        device = NativeLive(live, proxy.address, *given, tokens[0], litert_library, certificate=certificate)
        assert device.step() and device.told == ["joined as client 0"]
        device.close()


ASKING = """
#include <stdio.h>
#include "tfpfl_live.h"
/* Says why a device cannot join. */
static void ask(const char *url, const char *state, const char *certificate) {
    float x[] = {0};
    int32_t y[] = {0};
    tfpfl_live_data data = {.train = {.x = x, .numbers = 1, .labels = y, .count = 1}};
    tfpfl_live_options options = {.token = "token", .certificate = certificate, .patience = -1};
    tfpfl_live *live;
    tfpfl_live_open(url, state, &data, &options, &live);
    puts(tfpfl_live_error(live));
    fflush(stdout);
    tfpfl_live_close(live);
}
"""
TRUSTING = """
#include <openssl/ssl.h>
#include <stdlib.h>
/* The folder of certificates that the system trusts has the one in the environment. libcurl reads it by one of both. */
int X509_STORE_load_path(X509_STORE *store, const char *folder) {
    return folder != NULL && X509_STORE_load_file(store, getenv("TRUSTED"));
}
int SSL_CTX_load_verify_dir(SSL_CTX *context, const char *folder) {
    return X509_STORE_load_path(SSL_CTX_get_cert_store(context), folder);
}
int main(int count, char **arguments) {
    ask(arguments[1], arguments[2], count > 3 ? arguments[3] : NULL);
}
"""


def built(live, source, program, *libraries, asking=ASKING):
    """A program with `ask`, which may have functions of its own in the place of a library's."""
    return linked(asking + source, program, live / "libtfpfl_live.a", "-lcurl", *libraries, "-lcrypto")


def test_with_a_certificate_no_other_one_is_trusted(live, tmp_path, monkeypatch):
    """Those in the system's folder may sign the server's only if the app names none."""
    certificate, other = made_certificate(tmp_path / "both.pem"), made_certificate(tmp_path / "other.pem")
    program = built(live, TRUSTING, tmp_path / "trusting", "-lssl")
    monkeypatch.setenv("TRUSTED", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with Proxy(tls=context) as proxy:
        proxy.ask = lambda *_: (404, [], b"nobody")
        said = [
            subprocess.run([program, proxy.address, tmp_path / "device", *own], capture_output=True, text=True).stdout
            for own in ([], [certificate], [other])
        ]
    if "certificate" in said[0]:
        pytest.skip("this libcurl has no folder of certificates that it trusts")
    assert said[:2] == 2 * ["the server refused (404): nobody\n"]
    assert "does not answer: SSL certificate problem: " in said[2]


def test_a_patience_that_is_no_number_is_refused_before_the_server_is_asked(live, tmp_path):
    """It would never be over: a device whose server is away would ask for ever."""
    main = "int main(int count, char **arguments) { ask(arguments[1], arguments[count - 1], NULL); }"
    program = built(live, main, tmp_path / "program", asking=ASKING.replace(".patience = -1", ".patience = 0.0 / 0.0"))
    device = tmp_path / "device"
    said = subprocess.run([program, "http://127.0.0.1:9", device], capture_output=True, text=True, check=True).stdout
    assert said == "patience must be a number of seconds, found nan\n" and not device.exists()


WAITING = """
#include <time.h>
#include <stdio.h>
static int paused;
int nanosleep(const struct timespec *time, struct timespec *left) {
    (void)time, (void)left;
    return paused++, 0;
}
int main(int count, char **arguments) {
    ask(arguments[1], arguments[2], arguments[count - 1]);
    printf("%d\\n", paused);
}
"""


def test_a_certificate_whose_time_is_not_now_is_tried_again(live, tmp_path):
    """The clock of a device may be set a little later. One that nobody trusts ends the attempt at once."""
    program = built(live, WAITING, tmp_path / "waiting", asking=ASKING.replace(".patience = -1", ".patience = 0.5"))
    paused = []
    for days in (-3, 3, 0):
        trusted = made_certificate(tmp_path / "both.pem", days=days)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(trusted if days else made_certificate(tmp_path / "other.pem"))
        with Proxy(tls=context) as proxy:
            command = [program, proxy.address, tmp_path / "device", trusted]
            said, number = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert said.startswith(f"{proxy.address} does not answer: SSL certificate problem: ")
        paused.append(int(number))
    assert paused[0] > 0 and paused[1] > 0 and paused[2] == 0


def test_a_certificate_that_is_not_trusted_later_is_waited_for(live, litert_library, tmp_path):
    """A hotel's network may show its own page for a while; the server that answered before is still there."""
    certificate, other = made_certificate(tmp_path / "both.pem"), made_certificate(tmp_path / "other.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.num_tickets = 0  # with one, libcurl would not look at the next certificate
    back, answers = Timer(1.0, context.load_cert_chain, [certificate]), {"/v1/join": b'{"client": 0, "classes": 2}'}

    def hook(when, method, path, client):
        if when == "told" and path == "/v1/join":
            context.load_cert_chain(other)
            back.start()
            raise Lost

    x, y = np.zeros((3, 4), np.float32), np.array([0, 1, 0])
    with Proxy(hook, tls=context) as proxy:
        proxy.ask = lambda method, path, *_: (200 if path in answers else 404, [], answers.get(path, b"it is back"))
        given = proxy.address, tmp_path / "device", {"train": (x, y)}, "token", litert_library
        with pytest.raises(NativeError, match=r"^the server refused \(404\): it is back$"):
            NativeLive(live, *given, patience=60.0, certificate=certificate)


PROXIED = """
int main(int count, char **arguments) { ask(arguments[count - 2], arguments[count - 1], NULL); }
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_a_server_on_this_machine_is_asked_without_a_proxy(live, tmp_path, monkeypatch, host):
    """Otherwise the proxy of a company would get the enrolment token, and could reach no server here."""
    program, asked = built(live, PROXIED, tmp_path / "proxied"), []
    with Proxy() as proxy:
        proxy.ask = lambda method, path, *_: asked.append(path) or (404, [], b"nobody")
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.address)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)

        def said(url):
            return subprocess.run([program, url, tmp_path / "device"], capture_output=True, text=True).stdout

        for scheme in ("http", "https"):
            assert said(f"{scheme}://{host}:9").startswith(f"{scheme}://{host}:9 does not answer: ") and not asked
        said("https://127.0.0.3:9")
        assert asked == ["127.0.0.3:9"]  # others are asked through it


BROKEN = """
#include <curl/curl.h>
#include <time.h>
static int asked, paused;
static double clock_is = 1000;
int clock_gettime(clockid_t id, struct timespec *time) {
    (void)id;
    *time = (struct timespec){.tv_sec = (time_t)clock_is};
    return 0;
}
int nanosleep(const struct timespec *time, struct timespec *left) {
    (void)time, (void)left;
    return paused++, 0;
}
/* The first attempt takes 400 seconds and breaks off; from then on an attempt takes 100 seconds. */
CURLcode curl_easy_perform(CURL *curl) {
    clock_is += asked++ == 0 ? 400 : 100;
    return curl == NULL ? CURLE_OK : CURLE_PARTIAL_FILE;
}
int main(int count, char **arguments) {
    ask("http://127.0.0.1:9", arguments[count - 1], NULL);
    printf("%d %d\\n", asked, paused);
}
"""


def test_patience_begins_when_the_server_goes_away(live, tmp_path):
    """A download that takes longer than the patience and breaks off once is asked for again: 300 seconds long."""
    program = built(live, BROKEN, tmp_path / "broken", asking=ASKING.replace("-1}", "300}"))
    done = subprocess.run([program, tmp_path / "device"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == ["4 3"]  # at 1400, 1500, 1600 and 1700 seconds


CLOSED = """
#include <curl/curl.h>
#include <signal.h>
#include <unistd.h>
/* As libcurl before 7.87 with OpenSSL, if the server has closed the connection. */
CURLcode curl_easy_perform(CURL *curl) {
    int ends[2];
    if (curl == NULL || pipe(ends) != 0 || close(ends[0]) != 0) return CURLE_OK;
    return write(ends[1], "?", 1) < 0 ? CURLE_SEND_ERROR : CURLE_OK;
}
int main(int count, char **arguments) {
    ask("https://127.0.0.1", arguments[count - 1], NULL);
    raise(SIGPIPE);
}
"""


def test_a_connection_that_the_server_has_closed_does_not_end_the_app(live, tmp_path):
    program = built(live, CLOSED, tmp_path / "closed")
    done = subprocess.run([program, tmp_path / "device"], capture_output=True, text=True, check=False)
    assert "https://127.0.0.1 does not answer: " in done.stdout
    assert done.returncode == -signal.SIGPIPE  # the app's own signals are the app's


def test_the_example_says_which_file_cannot_be_read(live, tmp_path):
    """Where there are no examples of a split, there is no file."""
    command, data = (
        [live / "live", "http://127.0.0.1:9", tmp_path / "data", tmp_path / "state", "x.so"],
        tmp_path / "data",
    )
    data.mkdir()
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert said == "Error: a device needs training examples\n"
    (data / "test_y.bin").mkdir()
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    assert said == f"{data}/test_y.bin: Is a directory\n"


def test_the_listing_in_the_documentation_is_the_example():
    listing = (CORE / "examples" / "live.c").read_text()
    shown = re.findall(r"```c\n(.*?)```", (CORE.parent / "docs" / "live.md").read_text(), re.S)
    assert shown and all(part in listing for part in shown) and "tfpfl_live_run" in shown[0]


@pytest.mark.parametrize("splits", [("train",), ("train", "test"), ("train", "validation", "test")])
def test_the_documentation_makes_the_numbers_that_the_example_reads(splits, tmp_path):
    """Of whatever splits there are, and with the number of classes, which the labels need not show."""
    rng = np.random.default_rng(0)
    examples = {split: (rng.random((5, 2, 3)), np.arange(5) % 3) for split in splits}
    done, data = converted(tmp_path, examples, {"classes": 4} if "test" in splits else None)
    assert done.returncode == 0, done.stderr
    write_raw(tmp_path / "expected", examples | {"classes": 4})
    expected = {path.name: path.read_bytes() for path in (tmp_path / "expected").glob("*.bin")}
    if "test" in splits:
        expected["classes.txt"] = b"4"
    assert {p.name: p.read_bytes() for p in data.iterdir() if p.suffix in (".bin", ".txt")} == expected
    assert len(expected) == 2 * len(splits) + ("test" in splits)


@pytest.mark.parametrize("y", [np.array([0.5, 1.0]), np.ones((2, 2), np.float32)])
def test_the_documentation_makes_no_labels_of_targets(y, tmp_path):
    done, data = converted(tmp_path, {"train": (np.zeros((2, 3)), y)}, {"classes": 2})
    assert done.returncode == 1 and done.stderr == "train.npz has targets: the example is for classes\n"
    assert [path.name for path in data.iterdir() if path.suffix == ".bin"] == []


def test_the_documentation_makes_no_examples_of_pixels_as_they_are_stored(tmp_path):
    """The client in Python refuses them, too; the one in C cannot know."""
    x = np.full((2, 3), 255, np.uint8)
    done, data = converted(tmp_path, {"train": (x, np.array([0, 1]))}, None)
    told = "train.npz has pixels (uint8): write them as the model takes them, x * scale + shift, float32\n"
    assert done.returncode == 1 and done.stderr == told and not list(data.glob("*.bin"))


def converted(folder, examples, about):
    """What the command of docs/live.md says, and the folder in which it ran."""
    (command,) = re.findall(r'```bash\npython -c "\n(.*?)"\n```', (CORE.parent / "docs" / "live.md").read_text(), re.S)
    (data := folder / "data").mkdir()
    for split, (x, y) in examples.items():
        np.savez(data / f"{split}.npz", x=x, y=y)
    if about is not None:
        (data / "about.json").write_text(json.dumps(about))
    return subprocess.run([sys.executable, "-c", command], cwd=data, capture_output=True, text=True, check=False), data


def test_the_core_needs_neither_of_the_libraries(live, programs):
    """What an app links that takes no part in live rounds."""
    for folder, name, expected in ((programs, "libtfpfl_device.so", False), (live, "libtfpfl_live.so", True)):
        linked = subprocess.run(["ldd", folder / name], capture_output=True, text=True, check=True).stdout
        assert all((library in linked) == expected for library in ("libcurl", "libcrypto")), linked
    assert (live / "libtfpfl_live.so").stat().st_size < 170_000
    assert (live / "libtfpfl_live.so").readlink() == Path("libtfpfl_live.so.0")
    shown = subprocess.run(["nm", "-D", "--defined-only", live / "libtfpfl_live.so"], capture_output=True, text=True)
    names = {line.split()[-1] for line in shown.stdout.splitlines()}
    assert {"tfpfl_live_run", "tfpfl_version"} < names and all(name.startswith("tfpfl_") for name in names)


def open_files(pid):
    return [str(path.resolve()) for path in Path(f"/proc/{pid}/fd").iterdir()]


def other_key(curve="SECP384R1", password=None):
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, pem = ec.generate_private_key(getattr(ec, curve)()), serialization.Encoding.PEM
    how = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(pem, serialization.PrivateFormat.PKCS8, how)


def locked_key():
    return other_key("SECP256R1", b"a password")


@pytest.fixture(scope="module")
def stranger(federation, kept_bundles, tmp_path_factory):
    """(a function that prepares a device's data and returns a server's address, [where, status, answer] in which this
    server is none); else it asks for a visit."""
    folder, change = tmp_path_factory.mktemp("stranger"), ["", 200, b""]
    with new_run(federation, folder / "run", kept_bundles) as run:
        examples = examples_of(run, 0)
    bundle = Bundle(kept_bundles / f"k{examples['classes']}")
    theta = (0.9 * bundle.theta()).astype("<f4").tobytes()
    settings = {name: bundle.manifest["training"][name] for name in ("tau", "beta", "head_rate")}
    work = {"kind": "visit", "round": 1, "theta": hashlib.sha256(theta).hexdigest(), "payload": "float32"}

    def ask(method, path, body, headers):
        name = path.removeprefix("/v1/").split("?")[0]
        where, status, answer = change
        if where == name or name.startswith((f"{where}/{work['theta']}", f"{where}/1")):
            return status, [], answer
        given = json.loads(answer) if where == "settings" else settings
        answers = {
            "join": json.dumps({"client": 0, "classes": examples["classes"]}),
            "bundle": json.dumps({"files": sorted(path.name for path in bundle.folder.iterdir())}),
            "work": json.dumps(work | {"settings": given, "splits": ["test", "another"]}),
        }
        if name in answers:
            return 200, [], answers[name].encode()
        files = {"head": bundle.folder / "head.bin"} | {f"bundle/{p.name}": p for p in bundle.folder.iterdir()}
        return 200, [], files[name].read_bytes() if name in files else theta

    def prepared(tmp_path):
        write_raw(tmp_path / "data0", examples)
        return proxy.address

    with Proxy() as proxy:
        proxy.ask = ask
        yield prepared, change


ANSWERS = {  # what is wrong: path, status, what is answered, and what is said of it
    "nothing": ("join", 200, b"", "the server's answer is not JSON: no value at byte 0"),
    "a list": ("join", 200, b"[1]", "the server's answer must be a JSON object"),
    "another number": (
        "join",
        200,
        b'{"client": -1, "classes": 2}',
        "the server's answer has no client and classes that a device can use",
    ),
    "a page": ("join", 404, b"<a>\n" + 300 * b"\xff", "the server refused (404): <a> " + 196 * "?"),
    "too long": ("join", 200, b" " * 17_000_000, "the server's answer to POST /v1/join has more than 16000000 bytes"),
    "no list": ("bundle", 200, b'{"files": 3}', "the server's answer has no files that a device can use"),
    "another folder": (
        "bundle",
        200,
        b'{"files": ["theta.bin", "../head.bin"]}',
        "names a file '../head.bin', which is no file of a bundle",
    ),
    "an object": (
        "bundle",
        200,
        b'{"files": [{"a": [1]}]}',
        "the server names a file {'a': [1]}, which is no file of a bundle",
    ),
    "no files": ("bundle", 200, b'{"files": []}', "bundle.new is not a bundle: it has no manifest.json"),
    "a short file": ("bundle/theta.bin", 200, b"short", "theta.bin is damaged: it has 5 bytes, and not the "),
    "a short head": ("head", 200, b"TFPFLH01", "head.first is not a head that tfpfl saved"),
    "a number": ("work", 200, b'{"kind": 3}', "the server's answer has no kind that a device can use"),
    "a path as theta": (
        "work",
        200,
        b'{"kind": "visit", "round": 1, "theta": "../x"}',
        "has no round and theta that a device can use",
    ),
    "another theta": (
        "theta",
        200,
        b"\0" * 100,
        "the server's theta does not have the hash that it was announced with",
    ),
    "a reason": ("theta", 404, b'{"error": "gone \xc3\xbc\\n\\ud800!"}', "the server refused (404): gone \u00fc ???!"),
    "a long reason": (
        "theta",
        404,
        b'{"error": "' + 900 * b"\xc3\xbc" + b'"}',
        "the server refused (404): " + 249 * "\u00fc" + "\n",
    ),
    "tau 0": ("settings", 200, b'{"tau": 0, "beta": 0.1, "head_rate": 0.1}', "has no settings that a device can use"),
    "revoked": (
        "update",
        403,
        b'{"error": "the token was revoked"}',
        "the server refused (403): the token was revoked",
    ),
}


@pytest.mark.parametrize("wrong", slow_but(ANSWERS, *list(ANSWERS)[:9], "another theta", ci=ANSWERS))
def test_answers_of_a_server_that_is_none(stranger, any_live, litert_library, wrong, tmp_path):
    """What comes from the network is checked; the process ends with one line."""
    (address, change), (where, status, answer, why) = stranger, ANSWERS[wrong]
    change[:] = [where, status, answer]
    with started(any_live, address(tmp_path), tmp_path, 0, "token", litert_library) as process:
        _, error = process.communicate()
    assert process.returncode > 0 and error.splitlines()[-1].startswith("Error: ") and why in error, error
    assert not (tmp_path / "device0" / "head.bin").exists() or where not in (
        "join",
        "bundle",
        "bundle/theta.bin",
        "head",
    )
    assert (tmp_path / "device0" / "update.bin").exists() == (where == "update")  # it may still count
