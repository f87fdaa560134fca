"""Executables whose file says what is not so: refused as a whole, whatever it is."""

import copy
import hashlib
import io
import json
import random
import zipfile

import pytest
import torch

from neuron_streams import Executable, compile  # noqa: A004
from neuron_streams._runtime.chain import ProgramHandle
from tests.compiler.compiled import deep, model, needs_cxx, pair
from tests.compiler.plans import deep_inputs
from tests.runtime.other_users import in_child


def entries(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def signed(path, data, manifest):
    """Write an archive whose digests are right."""
    data = {name: entry for name, entry in data.items() if name != "manifest.json"}
    manifest["sha256"] = {name: hashlib.sha256(entry).hexdigest() for name, entry in data.items()}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", json.dumps(manifest))
        for name, entry in data.items():
            archive.writestr(name, entry)
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "deep.zip"
    deep().save(path)
    return entries(path)


@pytest.fixture
def changed(original, tmp_path):
    """Save the deep model again after `change(manifest, plan)`."""

    def save(change):
        data = dict(original)
        manifest, plan = json.loads(data["manifest.json"]), json.loads(data["plan.json"])
        change(manifest, plan)
        data["plan.json"] = json.dumps(plan).encode()
        return signed(tmp_path / "deep.zip", data, manifest)

    return save


@needs_cxx
def test_one_that_is_not_changed_loads(changed):
    loaded = Executable.load(changed(lambda manifest, plan: None))
    assert repr(loaded) == repr(deep())


def put(*path):
    """A change: the last of these goes where the others lead to; DROP takes that away."""
    *way, key, value = path

    def change(place):
        for step in way:
            place = place[step]
        if value is DROP:
            del place[key]
        elif key == "+":
            place.append(value)
        else:
            place[key] = value

    return change


DROP = object()
LARGE = ["y", "float32", [200, 8], [8, 1]]
FIELDS = ["kind", "format", "payload", "name", "inputs", "outputs", "mutates", "structure"]
MANIFESTS = [
    (put("outputs", 0, LARGE), "other outputs"),
    (put("outputs", 0, ["y", "float32", [1, 8], [8, 1]]), "other outputs"),
    (put("outputs", 0, 1, "float64"), "other outputs"),
    (put("outputs", "+", LARGE), "returns 1 tensors and describes 2"),
    (put("outputs", []), "returns 1 tensors and describes 0"),
    (put("inputs", 0, LARGE), "other inputs"),
    (put("inputs", 0, DROP), "other inputs"),
    (put("inputs", 0, 3, [1, 2]), "not contiguous"),
    (put("inputs", 0, 2, [-2, 8]), "no numbers of elements"),
    (put("inputs", 0, 2, [2.0, 8]), "no numbers of elements"),
    (put("inputs", 0, 2, [True, 8]), "no numbers of elements"),
    (put("inputs", 0, ["x", "float32", [2**47, 8], [8, 1]]), "too large"),
    (put("inputs", 0, 1, "load"), "'load' is no dtype"),
    (put("inputs", 0, 0, "kv"), "names repeat"),
    (put("inputs", 0, 0, None), "name None of a tensor is no text"),
    (put("inputs", 0, None), "is damaged"),
    (put("mutates", "+", "z"), r"mutates \['z'\], which are no inputs"),
    (put("mutates", None), "its mutates are no list"),
    (put("payload", "hlo"), "'hlo' is no kind of payload"),
    (put("payload", "neff"), "it has entries"),
    (put("structure", "{"), "is damaged"),
    (put("name", 3), "its name is no text"),
    *((put(field, DROP), "is damaged|is not an executable") for field in FIELDS),
    *((put(field, None), "is damaged|is not an executable") for field in FIELDS),
    *((put(field, DROP), "is damaged: KeyError") for field in ("torch", "machine")),
]


@needs_cxx
@pytest.mark.parametrize(("change", "fault"), MANIFESTS, ids=range(len(MANIFESTS)))
def test_a_manifest_that_does_not_fit_is_refused(changed, change, fault):
    with pytest.raises(ValueError, match=fault):
        Executable.load(changed(lambda manifest, plan: change(manifest)))


# Of the deep model: step 0 runs library 0, step 1 is a window, and the last one runs library 2.
PLANS = [
    (put("results", [99]), "returns a value that is not there"),
    (put("results", [-1]), "no numbers of elements"),
    (put("results", [0]), "returns what no library has made"),
    (put("results", [3]), "returns what no library has made"),
    (put("results", [12, 12]), "returns a value twice"),
    (put("results", []), "describes other outputs"),
    (put("steps", 0, 1, 9), "step 0 runs a library that is not there"),
    (put("steps", 0, 1, 2), "step 0 gives its library other tensors"),
    (put("steps", 0, 2, 0, 10**6), "step 0 reads what is not there"),
    (put("steps", 0, 2, 0, 99), "step 0 reads what is not there"),
    (put("steps", 0, 2, 0, 2), "step 0 gives its library other tensors"),
    (put("steps", 0, 2, []), "step 0 gives its library other tensors"),
    (put("steps", 0, 3, 0, 10**9), "step 0 makes other values than its library"),
    (put("steps", 0, 3, []), "step 0 makes other values than its library"),
    (put("steps", 1, 1, 999), "step 1 reads a value that is not there"),
    (put("steps", 1, 2, 0), "step 1 makes a value of another number"),
    (put("steps", 1, 3, "+", 4), "step 1 has sizes and strides that do not agree"),
    (put("steps", 1, 3, 0, 4000), "step 1 reaches outside"),
    (put("steps", 1, 4, 0, 4000), "step 1 reaches outside"),
    (put("steps", 1, 5, 10**6), "step 1 reaches outside"),
    (put("steps", 2, 1, 13), "step 2 is a window on a window|reaches outside"),
    (put("steps", 1, 0, "jump"), "'jump' is no kind of step"),
    (put("steps", -1, DROP), "returns a value that is not there"),
    (put("steps", "+", None), "is damaged"),
    (put("inputs", 0, DROP), "describes other inputs"),
    *((put(field, DROP), "is damaged") for field in ("inputs", "steps", "results")),
]


@needs_cxx
@pytest.mark.parametrize(("change", "fault"), PLANS, ids=range(len(PLANS)))
def test_a_plan_that_does_not_fit_is_refused(changed, change, fault):
    with pytest.raises(ValueError, match=fault):
        Executable.load(changed(lambda manifest, plan: change(plan)))


@needs_cxx
def test_what_is_wrong_is_a_sentence(changed):
    path = changed(lambda manifest, plan: manifest.update(inputs=[None]))
    with pytest.raises(ValueError, match=rf"^{path} is damaged: .*\. Compile it again\.$"):
        Executable.load(path)


HOSTILE = [None, True, -1, 0, 1, 7, 10**6, 2**63, 1e300, "", "x", [], [0], {}, "float64", [[]]]


def spoil(value, chance):
    """A copy of JSON in which one place holds something else."""
    value = copy.deepcopy(value)
    place = value
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        if not keys:
            return value
        key = chance.choice(list(keys))
        if isinstance(place[key], list | dict) and chance.random() < 0.8:
            place = place[key]
            continue
        place[key] = chance.choice(HOSTILE)
        return value


def load_hostile(original, path, seed):
    """How many of the spoilt files were refused; those that load must run as they say."""
    torch.set_num_threads(1)
    chance, refused = random.Random(seed), 0
    for _ in range(150):
        data = dict(original)
        manifest, plan = json.loads(data["manifest.json"]), json.loads(data["plan.json"])
        if chance.random() < 0.5:
            manifest = spoil(manifest, chance)
        else:
            plan = spoil(plan, chance)
        data["plan.json"] = json.dumps(plan).encode()
        signed(path, data, manifest)
        try:
            loaded = Executable.load(path)
        except ValueError:
            refused += 1
            continue
        (result,) = ProgramHandle(loaded._payload.content).run(deep_inputs())
        assert result.shape == loaded.outputs[0].shape == (2, 8)
        assert bool(result.isfinite().all())
    return refused


@needs_cxx
@pytest.mark.parametrize("seed", [0, 1])
def test_files_that_say_anything_are_refused_or_run(original, tmp_path, seed):
    assert in_child(load_hostile, original, tmp_path / "x.zip", seed) > 75


# Sizes


@needs_cxx
def test_a_packed_entry_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", b" " * 10**8)
    with pytest.raises(
        ValueError, match=r"bomb.zip is not an executable.*: an entry is compressed"
    ):
        Executable.load(path)


@needs_cxx
def test_an_entry_that_is_there_twice_is_refused(original, tmp_path):
    path = tmp_path / "twice.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", original["manifest.json"])
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("manifest.json", original["manifest.json"])
    with pytest.raises(ValueError, match="an entry is there twice"):
        Executable.load(path)


def packed(data):
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as before,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as after,
    ):
        for name in before.namelist():
            after.writestr(name, before.read(name))
    return file.getvalue()


@needs_cxx
@pytest.mark.parametrize(
    ("weights", "fault"),
    [
        (packed, "an entry is compressed"),
        (lambda data: b"", "is damaged: BadZipFile"),
        (lambda data: data[:-50], "is damaged: BadZipFile"),
    ],
)
def test_weights_are_checked_as_well(original, tmp_path, weights, fault):
    data = {**original, "weights.pt": weights(original["weights.pt"])}
    path = signed(tmp_path / "deep.zip", data, json.loads(original["manifest.json"]))
    with pytest.raises(ValueError, match=fault):
        Executable.load(path)


@needs_cxx
@pytest.mark.parametrize(
    "weights",
    [{}, [3], [torch.ones(3).to_sparse()], [torch.nn.Parameter(torch.ones(3))], [torch.ones(3)]],
    ids=["no list", "no tensor", "sparse", "parameter", "fewer"],
)
def test_other_weights_are_refused(original, tmp_path, weights):
    file = io.BytesIO()
    torch.save(weights, file)
    data = {**original, "weights.pt": file.getvalue()}
    path = signed(tmp_path / "deep.zip", data, json.loads(original["manifest.json"]))
    with pytest.raises(ValueError, match="is damaged"):
        Executable.load(path)


@needs_cxx
@pytest.mark.parametrize("library", [b"", b"junk"])
def test_a_library_that_does_not_load_is_refused(original, tmp_path, library):
    data = {**original, "0.so": library}
    path = signed(tmp_path / "deep.zip", data, json.loads(original["manifest.json"]))
    with pytest.raises(ValueError, match="is damaged"):
        Executable.load(path)


@needs_cxx
def test_entries_that_nobody_asked_for_are_refused(original, tmp_path):
    data = {**original, "more.txt": b""}
    path = signed(tmp_path / "deep.zip", data, json.loads(original["manifest.json"]))
    with pytest.raises(ValueError, match="it has entries"):
        Executable.load(path)


@pytest.mark.parametrize("what", ["inputs", "outputs"])
def test_an_exported_one_is_checked_against_its_graph(tmp_path, what):
    path = tmp_path / "exported.zip"
    compile(model(), deep_inputs(), mutates=["kv"], target="exported").save(path)
    data = entries(path)
    manifest = json.loads(data["manifest.json"])
    manifest[what][0][2:] = [[200, 8], [8, 1]]
    with pytest.raises(ValueError, match=f"describes other {what} than its graph has"):
        Executable.load(signed(path, data, manifest))


@needs_cxx
def test_several_outputs_come_back(tmp_path):
    pair().save(tmp_path / "pair.zip")
    loaded = Executable.load(tmp_path / "pair.zip")
    total, double = loaded(torch.ones(2, 3), torch.ones(3))
    assert total.cpu().tolist() == double.cpu().tolist() == [[2, 2, 2]] * 2
