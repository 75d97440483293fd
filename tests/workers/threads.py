"""Workers in threads of this process, over the same sockets: the same code without a start of seconds."""

import threading

from mmrl.workers.rendezvous import KEY, dial
from mmrl.workers.worker import serve

NOBODY = 1 << 23  # no process has this id


class Running:
    pid, returncode = NOBODY, None

    def poll(self):
        return None

    def wait(self):
        return None


class InThread:
    """A launch. links: of the workers that were started, by their names."""

    def __init__(self):
        self.links = {}

    def __call__(self, arguments, environment, log):
        host, port, name = arguments[-3:]
        link = self.links[name] = dial(host, int(port), environment[KEY], name)
        threading.Thread(target=self._serve, args=(link,), daemon=True).start()
        log.touch()
        return Running()

    def _serve(self, link):
        try:
            serve(link)
        except (EOFError, OSError):
            link.close()
