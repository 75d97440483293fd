"""Workers in threads of this process, over the same sockets: the same code without a start of seconds."""

import socket
import threading

from mmrl.children.channel import Channel
from mmrl.children.listener import Pair
from mmrl.children.main import serve
from mmrl.workers.worker import RolloutWorker

NOBODY = 1 << 23  # no process has this id


class Running:
    pid, returncode = NOBODY, None

    def poll(self):
        return None

    def wait(self, timeout=None):
        return None

    def kill(self):
        pass


class InThread:
    """A launch. started: services, one for each thread."""

    def __init__(self):
        self.started = []

    def __call__(self, service):
        pair = Pair()
        theirs = Channel(socket.socket(fileno=pair.theirs.detach()))
        self.started.append(service)
        threading.Thread(target=serve, args=(theirs, RolloutWorker, theirs.close), daemon=True).start()
        return Running(), pair
