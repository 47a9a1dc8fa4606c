"""Lines of held-out modules as problems: write the line, then the module's code is run.

A problem is a statement of one line that the expressions of `TESTS` run, and whose loss changes
what they give. A line that a model wrote in its place passes if every expression gives what it
gave before, or raises the same kind of error. The rest of the module stays as it is, so that small
models pass some; that is a task of infilling, easier than to write whole functions.

Code that a model wrote runs in processes of its own, in an empty folder, which may write nothing
into files, take 1 GB of memory and a second of a core. That stops accidents and is no sandbox. This
file imports no package, since it also runs there.
"""

import ast
import contextlib
import importlib
import importlib.util
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS, MEMORY = 1, 1 << 30
EACH = 8  # problems of a module
SHORTEST = 6  # characters of a line worth asking for
ANSWERS: dict[tuple[str, int, str], bool] = {}  # of jobs that were run: models repeat each other

TESTS = {
    "calendar": (
        "[weekday(y, 2, 28) for y in (1900, 2000, 2024)]",
        "[monthrange(y, m) for y in (1999, 2000) for m in (2, 12)]",
        "[isleap(y) for y in (1900, 2000, 2023, 2024)], leapdays(1900, 2001)",
        "timegm((2020, 2, 29, 12, 30, 15))",
        "TextCalendar(6).formatmonth(2024, 2, 4, 2)",
        "TextCalendar().formatyear(2023, 3, 1, 5, 2)",
        "HTMLCalendar().formatmonth(2021, 5)",
        "list(Calendar(3).itermonthdays2(2022, 10))",
        "Calendar(1).monthdayscalendar(2015, 2), Calendar().yeardayscalendar(2001, 4)[0][0]",
    ),
    "colorsys": tuple(
        f"[tuple(round(v, 9) for v in {name}(*c)) for c in ((.1, .5, .9), (.9, .2, .4), "
        "(.3, .8, .2), (.5, .5, .5), (.95, .4, .7), (.7, .9, .1), (.45, .3, .6))]"
        for name in (
            "rgb_to_yiq", "yiq_to_rgb", "rgb_to_hls", "hls_to_rgb", "rgb_to_hsv", "hsv_to_rgb"
        )
    ),
    "configparser": (
        "[dict(p[s]) for p in [ConfigParser()] if not p.read_string("
        "'[a]\\nx = 1\\ny: two\\n  three\\n# no\\n[b]\\nz = %(w)s 4\\nw = 5\\n') for s in p]",
        "[p.getint('a', 'x') + p.getfloat('a', 'y') for p in [ConfigParser()] "
        "if not p.read_dict({'a': {'x': 3, 'y': '2.5'}})]",
        "[p.getboolean('a', k) for p in [RawConfigParser(allow_no_value=True)] "
        "if not p.read_string('[a]\\nx=on\\ny=No\\n') for k in ('x', 'y')]",
        "[(p.sections(), p.has_option('a', 'X'), p.remove_option('a', 'x'), p.options('a')) "
        "for p in [ConfigParser()] if not p.read_dict({'a': {'x': 1, 'k': 2}, 'b': {}})]",
        "ConfigParser().read_string('x = 1')",
        "[p['a']['u'] for p in [ConfigParser(interpolation=ExtendedInterpolation())] "
        "if not p.read_dict({'a': {'u': '${v} ${b:w} $$'  , 'v': '1'}, 'b': {'w': '2'}})]",
    ),
    "csv": (
        "[(d.delimiter, d.quotechar, d.skipinitialspace) for d in [Sniffer().sniff("
        "'a;b;c\\n1;2;3\\n4;5;6\\n'), Sniffer().sniff(\"'a', 'b'\\n'c', 'd'\\n\")]]",
        "Sniffer().has_header('name,age\\nann,31\\nbob,45\\ncyd,27\\n')",
        "list(DictReader(['a,b', '1,2', '', '3', '4,5,6'], restval='-'))",
        "[(w.writeheader(), w.writerow({'a': 1, 'c': 2}), f.getvalue()) for f in [StringIO()] "
        "for w in [DictWriter(f, ['a', 'b', 'c'], restval='?')]]",
        "DictWriter(StringIO(), ['a']).writerow({'b': 1})",
    ),
    "fractions": (
        "[Fraction(t) for t in ('3/6', ' -1.25e1', '7', '.5')]",
        "Fraction('1/x')",
        "Fraction(3, 8) + Fraction(5, 12), Fraction(3, 8) - Fraction(5, 6), Fraction(4, 6) * "
        "Fraction(9, 8), Fraction(4, 6) / Fraction(-8, 9)",
        "[Fraction(f).limit_denominator(n) for f, n in ((3.14159265, 10), (0.3333, 99), (2.5, 1))]",
        "Fraction(7, 3) // 2, Fraction(-7, 3) % Fraction(1, 2), divmod(Fraction(9, 4), 1)",
        "Fraction(2, 3) ** 3, Fraction(2, 3) ** -2, Fraction(-2, 3) ** -3, Fraction(4, 9) ** 0.5",
        "[round(Fraction(a, 2)) for a in (-3, 1, 3, 5)], round(Fraction(22, 7), 2)",
        "[f(Fraction(-7, 2)) for f in (__import__('math').floor, __import__('math').ceil, int)]",
        "Fraction(1, 2) < 0.75, Fraction(1, 2) == 0.5, hash(Fraction(1, 2)) == hash(0.5), "
        "Fraction(1, 3) >= Fraction(2, 5), Fraction.from_float(0.75)",
        "Fraction(1, 0)",
    ),
    "gettext": (
        "[c2py(p)(n) for p in ('n!=1', 'n%10==1 && n%100!=11 ? 0 : n>4 ? 1 : 2', '!(n<3)||n==7') "
        "for n in (0, 1, 2, 5, 7, 11, 21)]",
        "_expand_lang('de_AT.UTF-8@euro'), _expand_lang('fr')",
        "c2py('n ? 1')",
        "c2py('(n')",
    ),
    "graphlib": (
        "list(TopologicalSorter({'d': {'b', 'c'}, 'b': {'a'}, 'c': {'b'}}).static_order())",
        "list(TopologicalSorter({1: [2], 2: [3], 3: [1]}).static_order())",
        "[(t.add(1, 2), t.prepare(), t.get_ready(), t.done(2), t.get_ready(), t.is_active(), "
        "t.done(1), t.is_active()) for t in [TopologicalSorter({3: [2]})]]",
        "TopologicalSorter({1: [2]}).get_ready()",
    ),
    "heapq": (
        "list(merge([1, 4, 7], [2, 3, 9], [])), list(merge([7, 4], [9, 8, 1], reverse=True))",
        "list(merge(['aa', 'b'], ['cccc', 'd', 'e'], key=len))",
        "nsmallest(3, [5, 1, 4, 2, 3]), nsmallest(1, [5, 2]), nsmallest(2, 'dbca', key=ord)",
        "nlargest(3, [5, 1, 4, 2, 3]), nlargest(1, [5, 2]), nlargest(2, 'dbca', key=ord)",
        "[(_siftdown(h, 0, 4), h) for h in [[1, 3, 5, 7, 2]]]",
        "[(_siftup(h, 0), h) for h in [[9, 3, 5, 7, 4, 6]]]",
    ),
    "html.parser": (
        "[p.seen for p in [type('P', (HTMLParser,), {'seen': (), "
        "'handle_starttag': lambda s, t, a: setattr(s, 'seen', s.seen + ((t, tuple(a)),)), "
        "'handle_endtag': lambda s, t: setattr(s, 'seen', s.seen + (t,)), "
        "'handle_data': lambda s, d: setattr(s, 'seen', s.seen + (d,)), "
        "'handle_comment': lambda s, d: setattr(s, 'seen', s.seen + ('!', d)), "
        "'handle_decl': lambda s, d: setattr(s, 'seen', s.seen + ('D', d)), "
        "'handle_pi': lambda s, d: setattr(s, 'seen', s.seen + ('?', d))})()] "
        "if not p.feed('<!DOCTYPE html><p class=\"a b\" id=x>1 &amp; 2<br/>&#65;</p><!-- no -->"
        "<?pi?><script>a<b</script>rest <') and not p.close()]",
    ),
    "http.cookies": (
        "[SimpleCookie('a=1; b=\"x\\\\\"y\"; c=z; Path=/; secure').output(sep='|')]",
        "[(c.output(), c['k'].value, c['k'].key) for c in [SimpleCookie()] "
        "if not c.__setitem__('k', 'v w,\\x01') and not c['k'].__setitem__('max-age', 5)]",
        "_quote('a;b\\n'), _unquote('\"a\\\\073b\\\\\"\"'), _unquote('plain')",
        "Morsel().__setitem__('nope', 1)",
        "[(m.set('k', 'v', 'v'), m.isReservedKey('Path'), m.js_output()) for m in [Morsel()]]",
    ),
    "ipaddress": (
        "[int(IPv4Address(a)) for a in ('1.2.3.4', '255.255.255.255')]",
        "IPv4Address('1.2.3.256')",
        "[str(IPv6Address(a)) for a in ('1:0:0:2::3', '::ffff:1.2.3.4', '::', '1::')]",
        "IPv6Address('1:2:3')",
        "list(map(str, summarize_address_range(IPv4Address('10.0.0.1'), IPv4Address('10.0.0.9'))))",
        "list(map(str, collapse_addresses(map(ip_network, ('10.0.0.0/25', '10.0.0.128/25', "
        "'10.0.2.0/24')))))",
        "[str(n) for n in ip_network('10.0.0.0/29').subnets(prefixlen_diff=2)], "
        "str(ip_network('10.0.4.0/24').supernet(3)), ip_network('10.0.0.0/30').num_addresses",
        "list(map(str, ip_network('10.0.0.0/28').address_exclude(ip_network('10.0.0.4/30'))))",
        "[str(h) for h in ip_network('10.0.0.0/29').hosts()]",
        "ip_network('10.0.0.1/8')",
        "ip_address('fe80::1').exploded, ip_address('2001:db8::').reverse_pointer, "
        "ip_address('1.2.3.4').reverse_pointer, str(ip_interface('1.2.3.4/255.255.0.0').network)",
        "[(a.is_private, a.is_loopback, a.is_multicast) for a in map(ip_address, ('10.1.1.1', "
        "'127.0.0.1', '224.0.0.1', '8.8.8.8', '::1'))]",
    ),
    "plistlib": (
        "dumps({'b': [1, 2.5, True, b'xyz'], 'a': 'q<&'}).decode()",
        "loads(dumps({'b': [1, 2.5, False, b'xyz' * 40, {'c': -7}], 'a': 'q<&'}))",
        "loads(dumps({'b': [1, 2 ** 40, -3, 2.5, None, b'x' * 20, 'e' * 30, 'é'], 'a': {'c': "
        "UID(3)}}, fmt=FMT_BINARY))",
        "dumps({1: 2})",
        "loads(b'nothing')",
    ),
    "shlex": (
        "split('a \"b c\" d\\\\ e # f', comments=True), split(\"it''s 'q r'\")",
        "split('\"open')",
        "list(shlex('a=b; c&&d | \"e f\"', punctuation_chars=True))",
        "list(shlex('x.y \"z w\"\\n#no\\nq'))",
        "join(['a b', 'c', \"d'e\", '']), quote('safe_1')",
        "[(s.push_token('x'), s.get_token(), s.get_token()) for s in [shlex('y z')]]",
    ),
    "statistics": (
        "median([5, 1, 4]), median([4, 1, 2, 3]), median_low([4, 1, 2, 3]), median_high([4, 1])",
        "mean([1, 2, 4]), fmean([1.5, 2], [3, 1]), harmonic_mean([2, 6]), geometric_mean([2, 8])",
        "median_grouped([1, 2, 2, 3, 4, 4], 2), mode('abbc'), multimode('aabbc')",
        "median([])",
        "quantiles([1, 5, 2, 8, 4], n=4), quantiles([1, 5, 2], n=3, method='inclusive')",
        "variance([1, 2, 4, 9]), pvariance([1, 2, 4]), stdev([1, 5, 2]), pstdev([1, 5, 2])",
        "covariance([1, 2, 3], [4, 7, 5]), correlation([1, 2, 3], [4, 7, 5]), "
        "linear_regression([1, 2, 4], [3, 5, 8])",
        "[round(f(NormalDist(2, 3)), 9) for f in (lambda d: d.pdf(1), lambda d: d.cdf(4), lambda "
        "d: d.inv_cdf(.3), lambda d: d.overlap(NormalDist(1, 2)), lambda d: d.zscore(5))]",
        "NormalDist(1, 2) + NormalDist(3, 4), NormalDist(1, 2) * 3 - 1",
        "NormalDist(0, -1)",
        "[round(NormalDist(0, 1).inv_cdf(p), 9) for p in (.001, .5, .98, .9999999)]",
    ),
    "textwrap": (
        "wrap('The quick brown fox jumped over the lazy dog', 12)",
        "fill('a-b hyphen-ated  words   supercalifragilistic', 10, initial_indent='* ', "
        "subsequent_indent='  ')",
        "shorten('Hello  wonderful world of ours', 16), shorten('Hello', 3, placeholder='.')",
        "dedent('  a\\n    b\\n\\n  c\\n'), dedent('\\ta\\n  b'), indent('a\\n\\nb\\n', '> ')",
        "wrap('one. two three four five', 9, max_lines=2), wrap('a\\tb\\nc', 4, expand_tabs=False)",
        "wrap('x' * 9, 4), wrap('x' * 9 + ' y', 4, break_long_words=False)",
        "wrap('a', 0)",
        "wrap('End.  Next one. ok', 30, fix_sentence_endings=True), wrap(' a b ', 9, "
        "drop_whitespace=False)",
    ),
    "tomllib._parser": (
        "loads('a = 1\\nb = \"x\\\\n\\\\u00e9\"\\n[t]\\nc = [1, 2.5, true]\\n"
        "[t.u]\\nd = {e = 0x1F}\\n')",
        "loads('[[p]]\\nn = 1\\n[[p]]\\nn = 2 # c\\n[p.q]\\nr = \\'raw\\\\n\\'\\n')",
        "loads('m = \"\"\"a\\n  b \\\\\\n  c\"\"\"\\nl = \\'\\'\\'x\\ny\\'\\'\\'\\n')",
        "loads('d = 1979-05-27T07:32:00Z\\nt = 07:32:00\\na.b.c = 1\\na.b.d = -inf\\n')",
        "loads('a = 1\\na = 2')",
        "loads('a = ')",
        "loads('a = [1,, 2]')",
    ),
    "uuid": (
        "UUID('{12345678-1234-5678-1234-567812345678}').hex, UUID(int=5).urn",
        "UUID('12')",
        "[(u.version, u.variant, u.fields) for u in [UUID(bytes=bytes(range(16)), version=4)]]",
        "uuid5(NAMESPACE_DNS, 'a.b'), uuid3(NAMESPACE_URL, 'c'), UUID(int=1) < UUID(int=2)",
        "UUID(bytes_le=bytes(range(16))).bytes_le, UUID(fields=(1, 2, 3, 4, 5, 6)).time",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """A line of a module: what stands before it, and the line itself, without its end."""

    module: str
    number: int  # of the line, from 0
    before: str
    line: str


def problems(each: int = EACH) -> list[Problem]:
    """`each` lines of a module, chosen at random; the same ones for one version of Python."""
    draw, chosen = random.Random(0), []
    for name in TESTS:
        lines = source_of(name).splitlines()
        found = statements(name)
        some = draw.sample(found, min(2 * each, len(found)))
        jobs = [(name, at, blank(lines[at]) + "pass") for at in some]
        noticed = [at for at, passes in zip(some, passed(jobs), strict=True) if not passes][:each]
        chosen += [Problem(name, at, "\n".join(lines[:at]), lines[at]) for at in sorted(noticed)]
    return chosen


def blank(line: str) -> str:
    """What a line begins with."""
    return line[: len(line) - len(line.lstrip())]


def passed(jobs: Sequence[tuple[str, int, str]]) -> list[bool]:
    """For (module, number of the line, what stands there instead): do all expressions agree?"""
    new = [job for job in dict.fromkeys(jobs) if job not in ANSWERS]
    cores = min(os.cpu_count() or 1, len(new) or 1)
    parts = [new[i::cores] for i in range(cores)]
    with ThreadPoolExecutor(cores) as pool:
        for part, got in zip(parts, pool.map(run, parts), strict=True):
            ANSWERS.update(zip(part, got, strict=True))
    return [ANSWERS[job] for job in jobs]


def run(jobs: Sequence[tuple[str, int, str]]) -> list[bool]:
    """The answers of one process."""
    with tempfile.TemporaryDirectory() as room:
        out = subprocess.run(
            [sys.executable, "-I", Path(__file__).resolve()], cwd=room, text=True,
            input=json.dumps(jobs), capture_output=True,
        )  # fmt: skip
    if out.returncode:
        raise SystemExit(f"a process that runs code ended with {out.returncode}: {out.stderr}")
    answers: list[bool] = json.loads(out.stdout)
    return answers


def source_of(name: str) -> str:
    path = importlib.util.find_spec(name)
    assert path is not None
    assert path.origin is not None
    return Path(path.origin).read_text("utf-8")


def statements(name: str) -> list[int]:
    """Lines of functions that the expressions run, and that are a statement or open a block."""
    source = source_of(name)
    lines = source.splitlines()
    inside: set[int] = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            for part in function.body:
                for node in ast.walk(part):
                    if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef):
                        body = getattr(node, "body", None)
                        end = body[0].lineno - 1 if body else node.end_lineno
                        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                        if end == node.lineno and not text:
                            inside.add(node.lineno - 1)
    ran: set[int] = set()

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != f"<{name}>":
            return None
        if event == "line":
            ran.add(frame.f_lineno - 1)
        return trace

    sys.settrace(trace)
    try:
        results(name, source)
    finally:
        sys.settrace(None)
    return [at for at in sorted(inside & ran) if len(lines[at].strip()) >= SHORTEST]


def results(name: str, source: str) -> list[str]:
    """What the expressions of a module give when it has this source."""
    module = types.ModuleType(name)
    module.__dict__["__package__"] = name.rpartition(".")[0]
    out = []
    with in_place(name, module):  # where its own enumerations and data classes look for it
        exec(compile(source, f"<{name}>", "exec", dont_inherit=True), module.__dict__)
        for text in TESTS[name]:
            try:
                out.append(repr(eval(text, module.__dict__)))
            except Exception as error:
                out.append(type(error).__name__)
    return out


@contextlib.contextmanager
def in_place(name: str, module: types.ModuleType) -> Iterator[None]:
    """Let `sys.modules` have a module for a while."""
    before = importlib.import_module(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        sys.modules[name] = before


def agrees(name: str, at: int, line: str, wanted: list[str]) -> bool:
    """Run a module with another line, in a process that is forked for it."""
    lines = source_of(name).splitlines()
    lines[at] = line
    child = os.fork()
    if child == 0:
        right = False
        with contextlib.suppress(BaseException):
            signal.alarm(60 * SECONDS)  # it may sleep; a busy machine takes its time
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            sys.stdout = sys.stderr = io.StringIO()
            right = results(name, "\n".join(lines) + "\n") == wanted
        os._exit(0 if right else 1)
    return os.waitpid(child, 0)[1] == 0


def main() -> None:
    """Answer jobs on stdin with a list of booleans."""
    jobs = json.load(sys.stdin)
    wanted = {name: results(name, source_of(name)) for name in {job[0] for job in jobs}}
    print(json.dumps([agrees(*job, wanted[job[0]]) for job in jobs]))


if __name__ == "__main__":
    main()
