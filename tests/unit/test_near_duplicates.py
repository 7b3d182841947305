"""Near-duplicates against the exact Jaccard similarity of all pairs."""

import functools
import itertools
import re

import numpy as np
import pytest

from corpus import near_duplicates

WORDS = [f"w{number}" for number in range(400)]


def shingles_of(text):
  words = re.findall(r"[a-z0-9]+", text.decode().lower())
  words += [""] * (5 - len(words))
  return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def jaccard(one, other):
  return len(one & other) / len(one | other)


def changed(words, share, random):
  """The words with about so many of them replaced."""
  return [
    random.choice(WORDS) if random.random() < share else word for word in words
  ]


def corpus(random, documents=90):
  """Texts of which some are copies with up to a fifth of the words changed."""
  texts = []
  for _ in range(documents):
    words = list(random.choice(WORDS, random.integers(30, 300)))
    texts.append(words)
    for share in random.choice([0, 0.01, 0.03, 0.05, 0.2], 3):
      texts.append(changed(words, share, random))
  order = random.permutation(len(texts))
  return [" ".join(texts[i]).encode() for i in order]


def sign(tmp_path, texts, sizes):
  """The folders of the signatures of so many texts each."""
  folders, begin = [], 0
  for number, size in enumerate(sizes):
    folder = tmp_path / f"{len(list(tmp_path.iterdir()))}-{number}"
    folder.mkdir()
    near_duplicates.write_signatures(texts[begin : begin + size], str(folder))
    folders.append(str(folder))
    begin += size
  assert begin >= len(texts)
  return folders


def edges_of(folders, threshold=0.8, parts=1):
  edges = near_duplicates.edges
  return np.concatenate(
    [
      edges(folders, band, part, parts, threshold)
      for band in range(near_duplicates.BANDS)
      for part in range(parts)
    ]
  )


def clusters_of(tmp_path, texts, sizes=None, **how):
  """The first text of each one's cluster."""
  folders = sign(tmp_path, texts, sizes or [len(texts)])
  return near_duplicates.clusters(len(texts), edges_of(folders, **how))


@functools.cache
def alike():
  """Texts, and {pair of them: its similarity}."""
  texts = corpus(np.random.default_rng(3))
  sets = list(map(shingles_of, texts))
  pairs = itertools.combinations(range(len(texts)), 2)
  return texts, {pair: jaccard(sets[pair[0]], sets[pair[1]]) for pair in pairs}


ALIKE = {
  "ASCII": ("Don't (ever)\tstop_it!", "don t ever stop it"),
  "capitals": ("ПЁС Straße ΣΑΣ Ǆ ԱԲ", "пёс STRASSE σας ǆ աբ"),
  "quotes": ("don’t «go» „now“ donʼt don´t", "don't go now don't don`t"),
  "dashes": ("a\u2010b a\u2013b \u2014 a\u2212b", "a-b a-b a-b"),
  "spaces": ("1\u202f000\u00a0a\u3000b\u2003c", "1 000 a b c"),
  "not seen": ("re\u00adceive \ufeffma\u200bny \u2764\ufe0f", "receive many"),
  "forms": ("Ｆｕｌｌ ﬁne № e\u0301", "full fine no é"),
  "Thai": ("ภาษาไทย abcที่", "ภ า ษ า ไ ท ย abc ที่"),
  "Khmer and Burmese": ("ភាសា မြန်", "ភា សា မြ န်"),
  "marks of words": ("हिन्दी।किताब", "हिन्दी किताब"),
  "rare Chinese": ("𠮷野家a", "𠮷 野家 a"),
}


@pytest.mark.parametrize("name", ALIKE)
def test_words_are_those_of_a_reader(name):
  one, other = ALIKE[name]
  of = lambda text: near_duplicates.ngram_hashes([text.encode()], 1).values
  assert len(of(one)) > 1 and of(one).tolist() == of(other).tolist()


def test_words_do_not_depend_on_texts_beside_them():
  texts = []
  for pair in ALIKE.values():
    texts += [*map(str.encode, pair), b"plain", "\uffff \u0301a".encode()]
  alone = [near_duplicates.ngram_hashes([t], 1).values for t in texts * 99]
  together = near_duplicates.ngram_hashes(texts * 99, 1)
  np.testing.assert_array_equal(together.values, np.concatenate(alone))


def test_different_words_differ():
  texts = ["кот", "код", "école", "ecole", "ที่", "ที", "कि", "की", "1", "２", "ı"]
  hashes = near_duplicates.ngram_hashes([text.encode() for text in texts], 1)
  assert len(set(hashes.values.tolist())) == len(texts)


@pytest.mark.parametrize("threshold", [0.6, 0.8, 1.0])
def test_pairs_are_those_of_exact_similarity(tmp_path, threshold):
  """Precision is exact; recall of clusters is at least 98%."""
  texts, similarity = alike()
  exact = [pair for pair in similarity if similarity[pair] >= threshold]
  folders = sign(tmp_path, texts, [100, 0, 1, 199, 60])
  pairs = edges_of(folders, threshold)
  assert {tuple(pair) for pair in pairs.tolist()} <= set(exact)
  firsts = near_duplicates.clusters(len(texts), pairs)
  together = [firsts[a] == firsts[b] for a, b in exact]
  assert len(exact) > 50 and np.mean(together) >= 0.98
  assert (firsts <= np.arange(len(texts))).all()
  assert (firsts[firsts] == firsts).all()


def test_the_cut_into_folders_and_parts_changes_nothing(tmp_path, monkeypatch):
  texts = corpus(np.random.default_rng(5), 40)
  want = clusters_of(tmp_path, texts)
  monkeypatch.setattr(near_duplicates, "_READ_SHINGLES", 100)
  for sizes, parts in (([50, 60, 50], 3), ([1] * len(texts), 1)):
    assert (clusters_of(tmp_path, texts, sizes, parts=parts) == want).all()


def test_a_chain_is_one_cluster(tmp_path):
  words = [f"v{number}" for number in range(700)]
  begins = range(0, 400, 8)
  texts = [" ".join(words[begin : begin + 200]).encode() for begin in begins]
  assert not clusters_of(tmp_path, texts, threshold=0.85).any()
  assert not len(edges_of(sign(tmp_path, texts[::25], [2]), 0.85))


def test_hashes_are_the_same_everywhere():
  """They are in files that workers on other machines read."""
  got = near_duplicates.ngram_hashes([b"the same everywhere"], 3).values
  assert got.tolist() == [224904475159732309]


def test_overlaps():
  words = [f"u{number}" for number in range(40)]
  evaluation = " ".join(words[:20]).encode()
  ngrams = near_duplicates.ngram_hashes([evaluation, b"Too short."], 13).values
  texts = [
    " ".join(["x", *words[5:18], "y"]),
    " ".join(["x", *words[5:17], "y", *words[17:30]]),
    "too, SHORT",
    "much too short",
    "",
  ]
  got = near_duplicates.overlaps([t.encode() for t in texts], np.sort(ngrams))
  assert got.tolist() == [True, False, True, False, False]
  assert near_duplicates.overlaps([], ngrams).shape == (0,)
  none = np.zeros(0, np.uint64)
  assert near_duplicates.overlaps([b"a text", b""], none).tolist() == [0, 0]


# An East Asian character, or what stands between others and separators.
WORD = re.compile("[\u3040-\ud7a3]|[^\\W_\u3040-\ud7a3]+")


@pytest.mark.parametrize("size", [1, 2, 5, 13])
def test_ngram_hashes_are_equal_where_words_are(size):
  texts = [
    "The cat sat, on the mat; and the cat sat on the mat.",
    "THE  CAT\nsat on",
    "the cat",
    "Zwölf Boxkämpfer jagen Viktor über den Sylter Deich",
    "我们在公园里散步。 mixed中文words 한국어 も",
    # Case, punctuation and spaces do not count.
    *("Zürich", "zürich", "Zurich", "今天a天", "今天 a 天", "天今", "...", ""),
    *("a b", "b a", "a " * 9, "a " * 8),
  ]
  expected = []
  for text in texts:
    words = WORD.findall(text.lower())
    begins = range(max(1, len(words) - size + 1))
    expected.append([tuple(words[i : i + size]) for i in begins])
  encoded = [text.encode() for text in texts]
  hashes, offsets = near_duplicates.ngram_hashes(encoded, size)
  assert np.diff(offsets).tolist() == list(map(len, expected))
  pairs = set(zip(itertools.chain(*expected), hashes.tolist(), strict=True))
  ngrams, values = map(set, zip(*pairs, strict=True))
  assert len(ngrams) == len(values) == len(pairs)


def test_hashes_do_not_depend_on_blocks():
  words = np.random.default_rng(1).choice(WORDS, 60_000)
  text = " ".join(words).encode() + "中文".encode() * 50_000 + b"z" * 200_000
  long = near_duplicates.ngram_hashes([b"ab", text], 2)
  border = text.rindex(b" ", 0, 150_000)
  halves = [text[:border], text[border:]]
  short = near_duplicates.ngram_hashes(halves, 2)
  # The halves miss the pair of words at the border.
  missing = short.offsets[1]
  got = np.delete(long.values[1:], missing)
  np.testing.assert_array_equal(got, short.values)


def test_a_high_threshold_needs_few_bands(tmp_path):
  """Later ones are not even read; the first always is."""
  # A similarity at the threshold counts: 8 of 10 shingles are in both.
  texts = [" ".join(WORDS[:count]).encode() for count in (14, 12)]
  folders = sign(tmp_path, texts, [2])
  assert set(map(tuple, edges_of(folders).tolist())) == {(0, 1)}
  assert not len(edges_of(folders, 0.801))
  assert not len(near_duplicates.edges(["missing"], 1, 0, 1, 1.0))
  assert not len(near_duplicates.edges(["missing"], 14, 0, 1, 0.8))
  for band, threshold in ((0, 1.0), (13, 0.8), (31, 0.5)):
    with pytest.raises(FileNotFoundError):
      near_duplicates.edges(["missing"], band, 0, 1, threshold)


def test_near_copies_take_a_comparison_each(tmp_path, monkeypatch):
  """1,000 that have a key in common, half a million pairs; equal ones none."""
  with monkeypatch.context() as patch:
    patch.setattr(near_duplicates, "_similarity", None)
    text = " ".join(WORDS[:100])
    copies = [text.encode(), text.upper().encode()] * 1000
    pairs = edges_of(sign(tmp_path, copies, [900, 1100]))
    assert len(pairs) == len(copies) - 1
    assert not near_duplicates.clusters(len(copies), pairs).any()
  compared = []
  real = near_duplicates._similarity
  counted = lambda *sets: compared.append(1) or real(*sets)
  monkeypatch.setattr(near_duplicates, "_similarity", counted)
  text = " ".join(WORDS[:200])
  texts = [f"{text} x{number}".encode() for number in range(1000)]
  texts += [text.encode()] * 1000
  assert not clusters_of(tmp_path, texts).any()
  assert len(compared) <= 14 * 1001


@pytest.mark.parametrize(
  "begins, most, pairs",
  [
    ([500, 0, 11, 22, 33], 16, [(1, 2), (2, 3), (3, 4)]),
    ([0, 20, 10], 16, [(1, 2), (0, 2)]),
    ([0, 20, 10, 5], 16, [(1, 2), (0, 2), (2, 3)]),
    ([0, 200, 400, 5], 3, [(0, 3)]),
    ([0, 200, 400, 600, 5], 3, []),
  ],
  ids="first-near-none joins-two joins-one nearest-3 no-more-than-3".split(),
)
def test_documents_of_a_key_are_connected(monkeypatch, begins, most, pairs):
  """Each has the 100 shingles from its begin on; `most` before it count."""
  monkeypatch.setattr(near_duplicates, "_COMPARED", most)
  group = [
    (0, number, np.arange(begin, begin + 100, dtype=np.uint32))
    for number, begin in enumerate(begins)
  ]
  assert list(near_duplicates._connect(group, 0.8)) == pairs


def test_clusters_are_connected_components():
  pairs = np.array([[4, 7], [2, 7], [5, 6], [5, 6]])
  firsts = near_duplicates.clusters(9, pairs)
  assert firsts.tolist() == [0, 1, 2, 3, 2, 5, 5, 2, 8]
  none = near_duplicates.edges([], 0, 0, 1, 0.8)
  assert near_duplicates.clusters(3, none).tolist() == [0, 1, 2]
  assert near_duplicates.clusters(0, none).tolist() == []
