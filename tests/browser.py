"""A browser without a window, driven over the pipe of the DevTools protocol: messages of JSON, each ended by a 0."""
import base64, json, os, shutil, subprocess, tempfile, time


def find():
    """The path of a Chromium, or None."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if shutil.which(name):
            return shutil.which(name)
    return None


class Browser:
    def __init__(self, width=1200, height=900):
        self.profile = tempfile.mkdtemp(prefix="browser-", dir=os.getcwd())  # goes with the folder of the test, too
        from_us, self.to_browser = os.pipe()
        self.from_browser, to_us = os.pipe()

        def ends():  # the browser reads from 3 and writes to 4
            a, b = os.dup(from_us), os.dup(to_us)
            os.dup2(a, 3), os.dup2(b, 4)

        self.process = subprocess.Popen(
            [find(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-background-networking", "--remote-debugging-pipe", "--user-data-dir=" + self.profile,
             f"--window-size={width},{height}", "about:blank"],
            preexec_fn=ends, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(from_us), os.close(to_us)
        self.number, self.buffer, self.events, self.session = 0, b"", [], None
        page = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")

    def read(self):
        while b"\0" not in self.buffer:
            part = os.read(self.from_browser, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self.buffer += part
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def run(self, script):
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", script))
        return answer["result"].get("value")

    def open(self, path):
        """Opens a file. Returns the seconds until the page has been drawn."""
        self.events.clear()
        started = time.time()
        self.call("Page.navigate", url="file://" + os.path.abspath(path))
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self.read())
        self.settle()
        return time.time() - started

    def settle(self):
        """Waits until what was asked for has been drawn."""
        self.run("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => requestAnimationFrame(r))))")

    def size(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.settle()

    def media(self, media="", dark=False):
        self.call("Emulation.setEmulatedMedia", media=media,
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.settle()

    def mouse(self, kind, x, y, **more):
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def move(self, x, y):
        self.mouse("mouseMoved", x, y)
        self.settle()

    def drag(self, x0, x1, y):
        self.mouse("mousePressed", x0, y, button="left", buttons=1, clickCount=1)
        self.mouse("mouseMoved", (x0 + x1) / 2, y, button="left", buttons=1)
        self.mouse("mouseMoved", x1, y, button="left", buttons=1)
        self.mouse("mouseReleased", x1, y, button="left", clickCount=1)
        self.settle()

    def double_click(self, x, y):
        for count in (1, 2):
            self.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=count)
            self.mouse("mouseReleased", x, y, button="left", clickCount=count)
        self.settle()

    def key(self, key, shift=False):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=8 if shift else 0,
                      **({"text": key} if len(key) == 1 and kind == "keyDown" else {}))
        self.settle()

    def screenshot(self, path, whole=True):
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        with open(path, "wb") as f:
            f.write(base64.b64decode(answer["data"]))

    def pdf(self, path):
        with open(path, "wb") as f:
            f.write(base64.b64decode(self.call("Page.printToPDF")["data"]))

    def complaints(self):
        """What is in the console, and requests other than of the page itself."""
        self.run("1")  # what comes before its answer has been read
        found = []
        for event in self.events:
            params, method = event.get("params", {}), event.get("method")
            if method == "Runtime.consoleAPICalled":
                found.append("console: " + " ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
            elif method == "Runtime.exceptionThrown":
                found.append("exception: " + params["exceptionDetails"].get("exception", {}).get("description", "?"))
            elif method == "Log.entryAdded":
                found.append(f"log: {params['entry']['level']}: {params['entry']['text']}")
            elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "data:")):
                found.append("request: " + params["request"]["url"])
            elif method == "Page.javascriptDialogOpening":
                found.append("dialog: " + params["message"])
        return found

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.to_browser), os.close(self.from_browser)
        shutil.rmtree(self.profile, ignore_errors=True)
