"""A device in live rounds: it joins, visits when it is asked to, and commits its head when that was counted.

    device = LiveDevice("http://127.0.0.1:8443", "device-7", examples, token)
    device.run()                             # until the last round

If it is killed anywhere, it goes on at the next start: an update that was on its way is sent again, and its head
becomes current exactly if the server has counted it. The head, examples and labels never leave the device.
"""

import hashlib
import json
import math
import random
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tflite_export.device.errors import InvalidInput
from tflite_export.device.head_file import is_unicode
from tflite_export.device.layout import MANIFEST, PROGRAM
from tflite_export.device.live import wire
from tflite_export.device.live.answers import (
    Answer,
    ServerError,
    files_of,
    round_and_theta,
    round_of,
    splits_of,
    theta_of,
    unusable,
)
from tflite_export.device.live.connection import Connection, NotTrusted, check_way
from tflite_export.device.live.rests import SCORES, UPDATE, Rests
from tflite_export.device.live.secure.state import SecureState
from tflite_export.device.live.state import State
from tflite_export.device.live.wire import KEYS, MASKED, PHASES
from tflite_export.device.live.work import (
    Work,
    about_device,
    check_before_joining,
    check_examples,
    keep_bundle,
    keep_first_head,
)
from tflite_export.device.runtime import Bundle

_WAIT = 25.0  # seconds of a poll
_REST = 2.0  # seconds until a device that takes no part in a secure attempt asks again
_LONGEST_PAUSE = 15.0  # seconds between attempts while the server is away


class _AskedTooOften(ConnectionError):
    """The server is there, and wants the request later."""


class LiveDevice:
    """One device.

    Args:
        url: the server's address, such as 'https://example.org'; with http, it must be of this machine.
        folder: what the device keeps between starts; see state.py.
        examples: {'train', and if there are, 'validation', 'test': (x, y)}, with x preprocessed as the manifest says;
            'classes': K, if the labels do not show it.
        token: the enrolment token; needed once.
        interpreter: class of the interpreter, see `Runtime`.
        patience: seconds for which the server may be away.
        context: for https, with the server's certificate; default: those that Python trusts.
        log: (text) -> None, told what happens.
        half: ask for theta in half precision: half the bytes, and results that are a little different (docs/live.md).
        secure: send no update that is not masked, whatever the server asks for (docs/secure.md). A device that has
            joined a run with secure rounds never does.

    Raises:
        ServerError: the server refuses the device, or is away for longer than `patience`.
        InvalidInput: others could read the token on its way to this address; there are no training examples; `patience`
            is no time; the device has not joined and has no token; its folder is of another run; or it joined with
            other numbers of examples or classes than its data have now.
    """

    def __init__(
        self,
        url: str,
        folder,
        examples: dict,
        token: str | None = None,
        *,
        interpreter=None,
        patience: float = 300.0,
        context: ssl.SSLContext | None = None,
        log: Callable[[str], None] = lambda text: None,
        half: bool = False,
        secure: bool = False,
    ):
        check_way(url)
        check_examples(examples)
        if math.isnan(patience):  # it would never be over
            raise InvalidInput(f"patience must be a number of seconds, found {patience}")
        self.url, self.patience, self.log, self._rests = url.rstrip("/"), patience, log, Rests(log)
        self._connection, self.state = Connection(self.url, context), self._state(folder)
        try:
            self._signer = self.state.signer()
            self._half, self._last = half, ("", np.zeros(0, np.float32))  # the last theta, and the name it came by
            self._is_reached = False  # whether the server has answered since this start
            self._token, self._ahead = token, 0.0  # by how many seconds the server's clock is ahead
            self.rounds = 0  # updates that the server has counted since this start
            self._about = about_device(examples, self._signer)
            self._only_secure = secure
            member = self.state.member()
            if member is None:
                check_before_joining(examples, self._about["classes"])
                member = self._join()
            elif examples.get("classes") is None:  # the labels may lack the last ones
                self._about["classes"] = max(self._about["classes"], member["classes"])
            self.state.check_sizes(self._about)
            self.client_id = member["client"]
            from tflite_export.device.live.secure.visits import SecureVisits  # needs cryptography, which is here by now

            self._only_secure = self._only_secure or member["secure"]
            self._kept = SecureState(self.state.folder)
            self._secure = SecureVisits(self._kept, self.client_id, self._signer)
            self._get_bundle()
            self._begin(examples, interpreter)
            self._settle()
        except BaseException:
            self.close()  # the folder is free for the next try
            raise

    # What differs between devices that compute with LiteRT, as this one, and with TensorFlow (tfpfl/live/tf_device.py)

    runtime = "litert"
    can_mask = True  # whether it can take part in secure rounds
    _state: Callable = State
    _whole = MANIFEST  # the file that a bundle has when all of it is here

    def _program(self) -> str:
        """The sha256 of the program in the bundle."""
        return Bundle(self.state.bundle).manifest["files"][PROGRAM]["sha256"]

    def _begin(self, examples: dict, interpreter) -> None:
        """Opens the bundle and takes the examples."""
        self._get_head()
        self._work: Any = Work(self.state, examples, interpreter)
        self.client: Any = self._work.client
        self.examples: dict[str, Any] = self._work.examples

    def _pending(self) -> Any:
        """The update that is on its way, if there is one."""
        return self.state.pending(self.client.bundle.num_features, self.client.bundle.num_classes)

    def _counted(self, pending: Any) -> None:
        """Makes what the device has computed with an update current: the server has counted it."""
        self.client.start_from(pending.head)

    def _check_bundle(self, folder: Path) -> None:
        """Checks every hash of a bundle that came."""
        Bundle(folder)

    def _join(self) -> dict:
        if self._token is None:
            raise InvalidInput(f"{self.state.folder} has not joined yet: give the enrolment token")
        about = {**self._about, "token": self._token, "runtime": self.runtime}
        if (self.state.bundle / self._whole).exists():
            about["program"] = self._program()
        if self.can_mask:
            about["secure"] = 1
        if (known := self.state.run()) is not None:
            about["run"] = known
        answer = self._send("POST", "/v1/join", json.dumps(about).encode(), None)
        member, before = {"secure": False} | self._json(answer), self.state.member()
        if any(wire.entry_or(member, name, int, low, None) is None for name, low in (("client", 0), ("classes", 1))):
            raise unusable("client and classes")
        if before is not None and before["secure"]:
            member["secure"] = True  # what the device has hidden so far stays hidden
        member["examples"] = about["examples"]
        self._only_secure = self._only_secure or bool(member["secure"])
        if "run" in member:  # servers of before do not say it
            if not (isinstance(run := member["run"], str) and 1 <= len(run) <= 100 and is_unicode(run)):
                raise unusable("run")
            self.state.keep_run(run)
        self.state.keep_member(member)
        self.log(f"joined as client {member['client']}")
        return member

    def _get_bundle(self) -> None:
        """Takes the bundle from the server, once."""
        if not (self.state.bundle / self._whole).exists():
            names = files_of(self._json(self._ask("GET", "/v1/bundle")))
            files = ((name, self._good(self._ask("GET", f"/v1/bundle/{name}")).body) for name in names)
            keep_bundle(self.state, files, self._check_bundle)

    def _get_head(self) -> None:
        """Takes the initial head from the server, once."""
        if not self.state.head.exists():
            keep_first_head(self.state, self._good(self._ask("GET", "/v1/head")).body)

    def close(self) -> None:
        """Lets another process use the folder."""
        self._connection.close()
        self.state.close()

    def run(self, most: int | None = None) -> int:
        """Works until the run is over. Returns the number of updates that were counted since this start.

        Args:
            most: stop after so many updates; None: no limit.
        """
        while most is None or self.rounds < most:
            if not self.step():
                break
        return self.rounds

    def step(self, wait: float = _WAIT) -> bool:
        """Asks for work, and does it. Returns whether the run goes on.

        Args:
            wait: seconds for which the server may hold the question, and for which the device rests at most after
                refusals (rests.py): if it rests longer, nothing was done, and the next call goes on with the rest.
        """
        self._settle_update()  # one without an answer, if the caller goes on after an error
        if not self._rests.are_over(wait):
            return True
        have = f"&have={self._last[0] or 'none'}{'&half=1' if self._half else ''}"  # so that a new theta comes with it
        masks = "&secure=1" if self.can_mask else ""
        answer = self._good(self._ask("GET", f"/v1/work?wait={wait:g}{have}{masks}"))
        if answer.digest:
            work, content = wire.unpack(answer.body)
            self._keep_theta(theta_of(work), content, answer.digest)
        else:
            work = wire.read_json(answer.body)
        self._rests.begin(work)
        if not isinstance(work.get("kind"), str):  # as of a proxy in its place
            raise unusable("kind")
        if work["kind"] in PHASES:
            self._take_part(work)
            return True
        self._settle_secure()
        if work["kind"] == wire.VISIT:
            if self._only_secure:
                raise ServerError("the server asks for an update that is not masked, and this device sends none")
            self._visit(work)
        elif work["kind"] == wire.SCORE:
            self._score(work)
        elif work["kind"] not in (wire.NOTHING, wire.DONE):  # a newer server asks for more
            self._rests.sleep(min(wait, _LONGEST_PAUSE))
        return work["kind"] != wire.DONE

    def _theta(self, name: str) -> np.ndarray | None:
        if name == self._last[0]:
            return self._last[1]
        answer = self._ask("GET", f"/v1/theta/{name}{'?half=1' if self._half else ''}")
        if self._half and answer.status == 400:  # its numbers are too large for half precision
            answer = self._ask("GET", f"/v1/theta/{name}")
        if answer.status == 410:
            return None  # the round ended meanwhile
        self._keep_theta(name, self._good(answer).body, answer.digest or name)
        return self._last[1]

    def _keep_theta(self, name: str, content: bytes, digest: str) -> None:
        """Keeps a theta that came; its name is the sha256 of its float32 numbers, `digest` that of what was sent."""
        if hashlib.sha256(content).hexdigest() != digest:
            raise ServerError("the server's theta does not have the hash that it was announced with")
        self._last = name, np.frombuffer(content, "<f4" if digest == name else "<f2").astype(np.float32)

    def _visit(self, work: dict) -> None:
        theta = self._theta(round_and_theta(work)[1])
        if theta is None:
            return
        self.state.keep(self._work.visit(work, theta))
        self._settle()

    def _settle(self) -> None:
        """Ends what is on its way: the visit of a secure round, and an update."""
        self._settle_secure()
        self._settle_update()

    def _settle_update(self) -> None:
        """Sends the update that is on its way, until the server has said whether it counts.

        One that is not masked may have been sent before the device was for secure rounds alone. It is not sent again:
        the server is asked.
        """
        pending = self._pending()
        if pending is None:
            return
        number = pending.round_num
        if self._only_secure:
            self._end(pending, self._state_of(number) == "counted", "this device sends no update that is not masked")
            self.state.drop()
            return
        answer = self._ask("PUT", f"/v1/update/{number}", pending.body)
        if answer.status == 200:
            if wire.read_json(answer.body).get("counted") is not True:  # as of a proxy in its place
                raise ServerError(
                    "the server's answer does not say that the update is counted, which is sent again later"
                )
            self._end(pending, True)
            self._rests.taken(UPDATE)
        elif answer.status in (400, 409, 410, 413, 422):
            self._end(pending, False, answer.error)
            self._rests.refused(UPDATE, answer.status, number)
        else:
            self._good(answer)
        self.state.drop()
        self.state.check_sizes(self._about)

    def _end(self, pending: Any, counted: bool, why: str = "") -> None:
        """Makes the head of an update current if the server has counted it, and tells the log."""
        if counted:
            self._counted(pending)
            self.state.note_examples(wire.unpack(pending.body)[0]["examples"])
            self.rounds += 1
        self.log(f"round {pending.round_num}: {'counted' if counted else f'not counted: {why}'}")

    # Secure rounds

    def _visited(self) -> Any:
        """What was computed in the present secure round, if there is something."""
        if not self.can_mask:
            return None
        return self._kept.visit(self.client.bundle.num_features, self.client.bundle.num_classes)

    def _take_part(self, work: dict) -> None:
        """Sends the message of a phase; or refuses, and waits for the next attempt."""
        number, phase = round_of(work), work["kind"]
        visited = self._visited() if phase in (KEYS, MASKED) else None
        if visited is not None and visited.round_num != number:
            self._settle_secure()
            visited = None
        if phase == KEYS and (visited is None or wire.unpack(visited.body)[0]["theta"] != theta_of(work)):
            if (theta := self._theta(theta_of(work))) is None:
                return
            visited = self._work.visit(work | {"payload": "float32", "splits": []}, theta)
            self._kept.keep_visit(visited)
        try:
            body = self._secure.message(work, visited)
        except InvalidInput as error:
            self._refuse(work, str(error))
            return
        answer = self._ask("PUT", f"/v1/secure/{number}/{phase}", body)
        if answer.status in (400, 409, 413, 422):
            self._refuse(work, f"the server did not take {phase}: {answer.error}")
        elif answer.status != 410:  # too late does no harm: there may be another attempt
            self._good(answer)

    def _refuse(self, work: dict, why: str) -> None:
        number, attempt = (wire.entry_or(work, name, int, 1, 0) for name in ("round", "attempt"))
        self.log(f"round {number}, attempt {attempt}: this device takes no part: {why}")
        self._secure.refuse(why)
        seconds = wire.entry_or(work, "seconds", float, 0, _REST)
        time.sleep(min(seconds, _REST))  # the server goes on asking until the phase is over

    def _settle_secure(self) -> None:
        """Asks what became of a secure round, and makes its head current if it counts."""
        if (visited := self._visited()) is None:
            return
        if (state := self._state_of(visited.round_num)) != "open":
            self._end(visited, state == "counted", "it ended without this device")
            self._kept.drop()
            self.state.check_sizes(self._about)

    def _state_of(self, number: int) -> str:
        """What became of this device in a round, as the server says: 'counted', 'open' or 'over'."""
        state = self._json(self._ask("GET", f"/v1/secure/{number}")).get("state")
        if state not in ("counted", "open", "over"):  # as of a proxy in its place
            raise unusable("state")
        return str(state)

    def _score(self, work: dict) -> None:
        theta = self._theta(round_and_theta(work)[1])
        if theta is None:
            return
        self._work.receive(theta)
        self._send_scores(work, self._work.scores(splits_of(work)))

    def _send_scores(self, work: dict, rows: list[dict]) -> None:
        about = {"theta": work["theta"], "scores": rows}
        answer = self._ask("PUT", f"/v1/score/{work['round']}", json.dumps(about).encode())
        if answer.status == 422:  # as with an update, the device goes on without
            self.log(f"round {work['round']}: its scores were not taken: {answer.error}")
        if answer.status in (409, 410, 422):  # the first two come too late, which does no harm
            self._rests.refused(SCORES, answer.status, work["round"])
        else:
            self._good(answer)
            self._rests.taken(SCORES)

    # HTTP

    def _ask(self, method: str, target: str, body: bytes = b"") -> Answer:
        """Sends a signed request.

        A 401 is tried again with the server's time, since one of the clocks may be wrong or the server has just
        started; and if the server does not know the device any more, after joining again.
        """
        for pause in (0.0, 1.1, None):
            answer = self._send(method, target, body, self.client_id)
            if answer.status != 401 or pause is None:
                break
            if "has not joined" in answer.error and self._token is not None:
                self._join()
            self._ahead = answer.time - time.time() if answer.time is not None else self._ahead
            time.sleep(pause)
        return answer

    def _send(self, method: str, target: str, body: bytes, client: int | None) -> Answer:
        """Sends a request until there is an answer, with longer and longer pauses, as long as `patience`.

        The patience begins with the first failure. When the server is away, the log is told once.
        """
        until: float | None = None
        pause, is_told = 0.2, False
        while True:
            try:
                answer = self._once(method, target, body, client)
                self._is_reached = True
                return answer
            except (NotTrusted, OSError) as error:
                if isinstance(error, NotTrusted) and not self._is_reached:  # later it may be another network's page
                    raise ServerError(str(error)) from error
                if until is None:  # before that the server was there, as in a long download
                    until = time.monotonic() + self.patience
                if time.monotonic() + pause > until:
                    raise ServerError(f"{self.url} does not answer: {error}") from error
                if not is_told and not isinstance(error, _AskedTooOften):
                    self.log(f"{self.url} does not answer, and is asked again for {self.patience:g} s: {error}")
                    is_told = True
            time.sleep(pause * random.uniform(0.5, 1.0))  # not all devices at once
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _once(self, method, target, body, client) -> Answer:
        headers = {}
        if client is not None:
            stamp = self._signer.stamp(client, method, target, body, time.time() + self._ahead)
            headers = {**stamp.headers(), wire.BODY: hashlib.sha256(body).hexdigest()}
        status, content, told = self._connection.send(method, target, body, headers)
        answer = Answer(status, content, told.get(wire.BODY, ""))
        if answer.status in (408, 429):
            raise _AskedTooOften(f"status {answer.status}: {answer.error}")
        if answer.status >= 500:
            raise ConnectionError(f"status {answer.status}: {answer.error}")
        return answer

    def _good(self, answer: Answer) -> Answer:
        if answer.status != 200:
            raise ServerError(f"the server refused ({answer.status}): {answer.error}")
        return answer

    def _json(self, answer: Answer) -> dict:
        return wire.read_json(self._good(answer).body)
