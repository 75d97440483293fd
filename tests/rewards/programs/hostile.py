"""Programs that try to pass without computing, to look up the answer, to reach others, or to take all there is.

{VICTIM} is a file that they must neither read nor change, {PORT} one that listens on loopback, {PID} the trainer's.
"""

HOSTILE = {
    # ends
    "exits with success": "import os; os._exit(0)",
    "exits in C": "import ctypes; ctypes.CDLL(None)._exit(0)",
    "exits after its output": "import os, sys; sys.stdout.write('42'); sys.stdout.flush(); os._exit(0)",
    "raises SystemExit": "raise SystemExit(1)",
    "raises KeyboardInterrupt": "raise KeyboardInterrupt",
    "raises an exception that cannot be shown": ("class E(Exception):\n    def __str__(self): raise self\nraise E()"),
    "aborts": "import os; os.abort()",
    "segmentation fault": "import ctypes; ctypes.string_at(0)",
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "kills its group": "import os, signal; os.killpg(0, signal.SIGKILL)",
    # time
    "loops": "while True: pass",
    "sleeps": "import time; time.sleep(1e6)",
    "loops in C": "sum(10 ** 10 for _ in iter(int, 1))",
    "power tower": "9 ** 9 ** 9 ** 9",
    "ignores signals": (
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except Exception: pass\n"
        "while True: pass"
    ),
    "catastrophic pattern": "import re; re.match('(a+)+$', 'a' * 64 + 'b')",
    "waits for input": "import sys, os; os.read(os.pipe()[0], 1)",
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    # memory and processes
    "takes memory": "x = []\nwhile True: x.append(bytearray(1 << 28))",
    "takes memory at once": "x = bytearray(1 << 40)",
    "forks for ever": "import os\nwhile True: os.fork()",
    "threads for ever": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,), daemon=True).start()"
    ),
    "leaves a daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        while True: time.sleep(1)\n    os._exit(0)"
    ),
    "recurses": "def g(): return g()\ng()",
    "recurses in C": "import sys\nsys.setrecursionlimit(10 ** 9)\nx = []\nfor _ in range(10 ** 7): x = [x]\nrepr(x)",
    "prints without end": "while True: print('x' * 65536)",
    "huge file": "f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 24))",
    # files
    "reads the answer's file": "print(open({VICTIM!r}).read())",
    "removes a file": "import os; os.remove({VICTIM!r})",
    "overwrites a file": "open({VICTIM!r}, 'w').write('gone')",
    "renames a file": "import os; os.rename({VICTIM!r}, {VICTIM!r} + 'x')",
    "lists a folder": "import os; print(os.listdir(os.path.dirname({VICTIM!r})))",
    "links to a file": "import os; os.symlink({VICTIM!r}, 'l'); print(open('l').read())",
    "starts a shell": "import subprocess; print(subprocess.check_output(['/bin/cat', {VICTIM!r}], text=True))",
    "reads another's memory": "print(open('/proc/{PID}/environ').read())",
    # others
    "kills the trainer": "import os, signal; os.kill({PID}, signal.SIGKILL)",
    "kills its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "connects": "import socket; s = socket.create_connection(('127.0.0.1', {PORT}), 1); s.sendall(b'42'); print(42)",
    "listens": "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(42)",
    # the answer
    "equal to everything": (
        "class A(int):\n    def __eq__(self, other): return True\n    def __repr__(self): return '42'\n"
        "print(A(41) == 42)"
    ),
    "patches the comparison": (
        "import json, math, builtins\njson.dumps = lambda *a, **k: '42'\nbuiltins.all = lambda *a: True\nprint(41)"
    ),
    "looks for the answer in memory": (
        "import gc\nfor o in gc.get_objects():\n    if isinstance(o, dict) and o.get('outputs'): print(*o['outputs'])"
    ),
    "looks for the answer in frames": (
        "import sys\nf = sys._getframe()\nwhile f:\n"
        "    r = f.f_locals.get('request')\n    print(*(r.get('outputs', ()) if r else ()))\n    f = f.f_back"
    ),
    "writes to all descriptors": (
        "import os\nfor d in range(3, 64):\n    try: os.write(d, b'\\x10' + bytes(7) + b'{\"dict\": [[\"o\", 1]]}')\n"
        "    except OSError: pass"
    ),
    "changes the module that runs it": (
        "import mmrl.rewards.programs.executors as e\n"
        "e.scripts = e.functions = lambda r: {{'outputs': ['42']}}\nprint(41)"
    ),
}
