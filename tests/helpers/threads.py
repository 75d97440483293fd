"""Threads of this process that stand for ranks."""

import threading


def together(function, arguments, barrier):
    """What `function` gives for each argument, each in a thread of its own. What one of them raises is raised here, and
    the others do not wait for it at the barrier."""
    found, errors = [None] * len(arguments), []

    def run(place):
        try:
            found[place] = function(arguments[place])
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(arguments))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found
