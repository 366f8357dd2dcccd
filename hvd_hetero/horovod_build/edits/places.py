"""Edits by which a rank that was started ahead asks the launcher for its place (see ``joining``)."""

from hvd_hetero.horovod_build.edits.edit import Edit

__all__ = ["PLACE_EDITS"]

_RENDEZVOUS = "horovod/runner/elastic/rendezvous.py"
_REASON = "a rank that was started ahead learns its place when the others have stopped"

PLACE_EDITS = (
    Edit(
        _RENDEZVOUS,
        """# PUT methods
""",
        """GET_PLACE = 'place_of_a_rank_started_ahead'

# PUT methods
""",
        _REASON,
    ),
    Edit(
        _RENDEZVOUS,
        """                return self._get_rank_and_size(host, int(local_rank))

""",
        """                return self._get_rank_and_size(host, int(local_rank))
            if scope == GET_PLACE:
                host, local_rank = key.split(':')
                slot_info = driver.await_place(host, int(local_rank))
                place = slot_info and slot_info.to_response_string()
                return secret.sign(scope, key, codec.dumps_base64(place, to_ascii=False))

""",
        _REASON,
    ),
    Edit(
        "horovod/runner/gloo_run.py",
        """    return horovod_rendez_env


def _slot_info_to_command_fn""",
        """    if getattr(slot_info, 'starts_ahead', False):
        horovod_rendez_env["HOROVOD_STARTED_AHEAD"] = "1"
    return horovod_rendez_env


def _slot_info_to_command_fn""",
        _REASON,
    ),
    Edit(
        "horovod/common/basics.py",
        """        initialization_ok = True
""",
        """        if os.environ.pop('HOROVOD_STARTED_AHEAD', None):
            # The others are told now that this rank is ready; when they have stopped, it has a place
            from time import monotonic, sleep
            from horovod.runner.http.http_client import read_data_from_kvstore
            place, tries = None, 5
            while place is None:
                try:
                    place = read_data_from_kvstore(
                        os.environ['HOROVOD_GLOO_RENDEZVOUS_ADDR'], os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT'],
                        'place_of_a_rank_started_ahead',
                        '{}:{}'.format(os.environ['HOROVOD_HOSTNAME'], os.environ['HOROVOD_LOCAL_RANK']), timeout=60.0)
                    tries = 5
                except (RuntimeError, OSError):  # in hours the network may fail for seconds; or the launcher is gone
                    tries -= 1
                    if not tries:
                        raise
                    sleep(2.0)
            if place.startswith('-1'):
                raise SystemExit(0)  # the job is over, or has given up this host
            os.environ['HOROVOD_GIVEN_PLACE_AT'] = str(monotonic())
            names = ('RANK', 'SIZE', 'LOCAL_RANK', 'LOCAL_SIZE', 'CROSS_RANK', 'CROSS_SIZE')
            os.environ.update(('HOROVOD_' + name, number) for name, number in zip(names, place.split(',')))

        initialization_ok = True
""",
        _REASON,
    ),
)
