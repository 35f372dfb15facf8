"""Chronicles: English prose with facts on invented people, and questions whose answers the text determines.

Used to train and to judge the checkpoint in this folder. A document of a seed is always the same. Each person has
five facts. They stand together in one paragraph ("clustered") or each alone anywhere ("scattered") among filler, told
in one of several wordings. An answer restates them in one fixed wording and a fixed order, so that every word of
it is right or wrong. Seeds below HELD_OUT are never trained on.
This file knows nothing of tokens: lengths are estimates at CHARS_PER_TOKEN. Standard library only.

    python -m tiny.text               writes the example prompts and their answers to examples/
    python -m tiny.text SEED LENGTH LAYOUT     prints one document with its answer
"""
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

HELD_OUT = 1_000_000
LAYOUTS = ("clustered", "scattered")
END = "<|endoftext|>"
CHARS_PER_TOKEN = 4.2
FRAME = 25          # characters' worth of tokens around a question and its answer

# Word lists. A name in braces elsewhere is one word of its list; a list's own entries may hold such names again.
ONSETS = """Bar Bren Cad Cor Dal Dor Eb El Fal Fen Gar Gil Had Hest Ing Is Jar Jun Kel Kor Lem Lor Mar Mil Nad Nor Ob Os
            Pel Por Quin Ral Ros Sab Sel Tam Tor Ud Ul Var Ver Wen Wil Yar Yor Zan""".split()
ENDINGS = "a ab ac an and ara ard eck el en er eth ia ic ida in ina ior is o olf ona or oth ul us".split()
POOLS = {name: words.split() for name, words in dict(
    town_start="""Amber Ash Black Bram Briar Cold Copper Dun East Elder Fair Fern Fox Glen Harrow High Holm Kings Lang
                  Marsh North Oak Old Raven Red Rush Salt Silver Stone Thorn West White Wind Winter""",
    town_end="""bourne bridge brook bury by cliff combe cross dale field ford gate ham haven hurst ley mere mouth
                port stead stow ton wall well wick wood worth""",
    landmark="""abbey bakery barracks brewery bridge canal castle chapel cistern dairy ferry forge fountain gallows
                granary harbour inn kiln library lighthouse market mill monastery orchard pond prison quarry quay school
                smithy stables tannery theatre tollhouse tower vineyard weir windmill""",
    trade="""baker barber blacksmith bookbinder brewer bricklayer butcher carpenter chandler clerk cobbler cook cooper
             dyer farrier ferryman fletcher gardener gilder glazier goldsmith hatter herald hunter joiner locksmith
             mason midwife miller miner painter peddler plumber porter potter printer roofer saddler sailor scribe
             shepherd shipwright spinner stonecutter surveyor tailor tanner teacher thatcher tinker weaver
             wheelwright""",
    month="January February March April May June July August September October November December",
    colour="""black blue bronze brown chestnut cream crimson golden green grey lilac maroon pink purple red russet
              scarlet silver turquoise violet white yellow""",
    animal="""badger cat crow dog donkey duck falcon ferret fox frog goat goose hare hawk hedgehog hen horse lamb lizard
              magpie mare mouse mule newt parrot pig pigeon pony rabbit ram raven rooster sheep sparrow squirrel
              stoat swan toad tortoise weasel""",
    pet="""Bandit Biscuit Bramble Button Clover Comet Flint Ginger Hazel Honey Juniper Lucky Nettle Nutmeg Patch
           Pebble Pepper Pickle Pudding Rocket Rusty Smoke Socks Velvet""",
    instrument="""banjo bassoon bugle cello clarinet cornet drum dulcimer fiddle flute gong guitar harp horn
                  lute lyre mandolin oboe organ piano pipes tabor tambourine trombone trumpet tuba viola
                  whistle zither""",
    sign="""Anchor Anvil Apple Bell Boar Bull Crown Dolphin Dragon Eagle Feathers Hammer Kettle Key Lion Moon Otter
            Pheasant Plough Rose Salmon Ship Star Stag Sun Swallow Unicorn Wheel Wolf""",
    mood="Broken Crooked Drowsy Frozen Gentle Happy Hidden Hungry Laughing Lonely Lost Merry Proud Quiet Sleeping "
         "Weary",
    garment="apron bonnet cape cloak coat gown hood jacket jerkin robe shawl tunic vest",
    number="two three four five six seven eight nine ten eleven twelve",
    metal="bone brass copper gold horn iron ivory pearl pewter steel tin wooden",
    digit="0 1 2 3 4 5 6 7 8 9",
    digit1="1 2 3 4 5 6 7 8 9",
    surname="Barlow Carver Frost Hale Kemp Nash Pike Sharp Yates",
    title="Mr. Mrs. Dr. Capt.",
    adjective="""bitter bright careful cheerful cold damp dull dusty familiar fine foreign grand heavy hollow late long
                 narrow new plain quick quiet ragged rough short slow small sour steady strange tall warm wide""",
    weather="""breeze cloud dew drizzle fog frost gale hail heat ice mist rain sleet snow storm sunshine thaw thunder
               wind""",
    place="""barn bank church cottage courtyard ditch farm fence field gate garden hall hedge hill house kitchen lane
             meadow path river road roof shed shore square stream street valley village wall wood yard""",
    goods="""apples barley beans bread butter candles cheese cider cloth coal corn eggs fish flour hay herbs leather
             milk nails oats onions paper pears plums rope rye salt soap tea timber tools wax wheat wine wool""",
    thing="""barrel basket bell blanket boat bottle broom bucket candle cart chair clock coin crate door hammer hat
             kettle key ladder lamp letter map mirror plate pot purse ring rope sack saddle shoe spade stool table""",
    folk="""boy brother child cousin daughter farmer father girl guest judge lady landlord mayor merchant mother
            neighbour nephew nurse priest sergeant sister soldier son stranger student traveller widow""",
    moved="came climbed crept drifted hurried passed ran rode rolled sailed travelled turned walked wandered",
    said="asked answered called cried muttered replied said shouted whispered",
    did="bought borrowed broke carried counted dropped found forgot kept lent lost mended moved painted sold stole "
        "washed",
    time="""afternoon autumn dawn dusk evening midnight morning night noon spring summer winter""",
    day="Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    unit="feet inches yards",
    how="badly calmly gently gladly hardly loudly often quickly rarely slowly softly suddenly twice well",
).items()}
POOLS.update(
    town=["{town_start}{town_end}"],
    inn=["{mood} {sign}"],
    tens=["{digit1}{digit}"],
    some=["{digit1}{digit}", "{number}", "{digit1}.{digit}", "{digit1}{digit}{digit}", "several", "a dozen", "too few",
          "about {digit1}{digit}"],
    man=["{title} {surname}", "the {folk}", "the {adjective} {folk}", "the {trade}", "the {trade} from {town}",
         "the {folk}"],
    object=["the {thing}", "the {adjective} {thing}", "{some} sacks of {goods}", "the {colour} {thing}", "the {goods}"],
    where=["by the {place}", "near the {landmark}", "behind the {adjective} {place}", "on the road to {town}",
           "in {town}",
           "at the {inn}", "beyond the {place}", "in the {adjective} {place}"],
    when=["in the {time}", "before {time}", "on {day}", "last {time}", "one {adjective} {time}", "in {month}",
          "after {some} hours", "on the 1{digit1}th of {month}"],
)

# Sentences that no question asks about, with full stops, questions, quotations, decimals and abbreviations.
# "{person}" is one of the document's people.
FILLER = """The {weather} {moved} over the {place} {when}.
The {weather} was {adjective} {when}, and the {weather} that followed was worse.
{When}, {adjective} {weather} lay {where}.
The river rose {digit1}.{digit} feet {when} and fell again before {time}.
There was {weather} {where}, but the {place} stayed dry.
A {adjective} {weather} held the ships in port for {some} days.
Was it the {weather}, or only the {place}, that made the {folk} {how} turn back?
Nobody could remember a {adjective} {time} with so much {weather}!
At the market, {goods} cost {some} crowns a sack {when}.
The price of {goods} fell by {digit1}.{digit} crowns {when}, and {man} was glad.
{Man} {did} {object} {where}.
{Man} {did} {object} {when} and never spoke of it again.
{Man} {how} {did} {object}, because {man} had asked for it.
{When}, {man} {did} {object} and {did} {object}.
{Man} {moved} {where} with {object}.
{Man} {moved} {some} miles {when}, though the {place} was {adjective}.
{When}, {man} {moved} from {town} to {town} in {some} hours.
From {town} to {town} it is {some} miles by the {adjective} road.
The road past the {landmark} was {adjective} and {adjective} {when}.
Who {did} {object} {when}?
Why was {object} left {where}?
How much of the {goods} was sold {where}?
"Where is {object}?" {said} {man}.
"Is it {some} miles to {town}?" {said} {man} {where}.
"I have seen {object} {where}," {said} {man} {how}.
"Bring {object} before {time}!" {said} {man}.
"I have no {goods} left," {said} {man}, "and the {thing} is {adjective}."
{Man} looked at {object} and {said}, "It is {adjective}."
{Man} {said}, "Who {did} {object}?"
"No!" {said} {man}. "The {place} is too {adjective}."
The {trade} and the {trade} {how} {did} {object} {where}.
A {trade} of {town} {did} a {colour} {animal} for {some} crowns.
A {colour} {animal} {moved} across the {place} {when}.
Some say that a {colour} {animal} lives {where}.
The {animal} slept {where} until {man} {moved} past.
The {instrument} was heard {where} {when}, and nobody knew who played it.
A {colour} {garment} with {number} {metal} buttons hung {where}.
Every {garment} in the shop was {colour}, i.e. nothing was {colour}.
The {inn} sold {goods}, {goods}, etc. until {time}.
St. {surname} church stands {where} and is {some} years old.
The letter from {town} weighed {digit1}.{digit} pounds and smelled of {goods}.
It took {some} {unit} of rope to reach the {place}.
The {place} was {adjective}; the {place} was {adjective} too.
Of {some} {thing}s, only {number} were {adjective}.
{Man} counted {some} {thing}s {where} ... and then lost count.
{Man} had {number} {thing}s and {some} crowns.
In the year 1{digit}{digit}{digit} the {landmark} {where} burned down.
The bell of the {landmark} rang {number} times {when}.
A {folk} and a {folk} waited {where} for {object}.
The {adjective} {folk} would not sell {object}, not even for {some} crowns!
{Person} said nothing about {object}.
{Person} {moved} {where} {when}.
"Good morning!" called {Person} from the {place}.
{Man} asked {Person} about {object}, but it was gone.
{When}, {Person} {did} {object} {where}.
{Man} and {Person} {moved} {where} {when}.
Did {Person} ever see {object}?
"Ask {Person}," {said} {man}.
"Come here, {pet}!" {said} {man} {where}.
{pet} is a name for a {animal}, not for a {folk}.""".split("\n")

# One line per kind of fact: the noun a question uses, the answer's wording, the text's wordings. {N} is the person.
FACTS = {
    "home": ("{N} lives in {town} near the {landmark}, and has never wished to live anywhere else.",
             ("{N} lives in {town} near the {landmark}", "{N} settled in {town} near the {landmark}",
              "{N} has a house in {town} near the {landmark}")),
    "trade": ("{N} works as a {trade} for {tens} crowns a week, which most people think is fair.",
              ("{N} works as a {trade} for {tens} crowns a week", "{N} was hired as a {trade} for {tens} crowns a week",
               "{N} serves as a {trade} for {tens} crowns a week")),
    "age": ("{N} turned {tens} in {month}, and the neighbours still talk about the feast that day.",
            ("{N} turned {tens} in {month}", "{N} reached the age of {tens} in {month}",
             "{N} became {tens} years old in {month}")),
    "animal": ("{N} keeps a {animal} named {pet}, and feeds it by hand every morning.",
               ("{N} keeps a {animal} named {pet}", "{N} owns a {animal} named {pet}",
                "{N} looks after a {animal} named {pet}")),
    "music": ("{N} plays the {instrument} at the {inn}, mostly late in the evening.",
              ("{N} plays the {instrument} at the {inn}", "{N} learned the {instrument} at the {inn}",
               "{N} is heard on the {instrument} at the {inn}")),
}
LEADS = ["By all accounts ", "It is well known that ", "People agree that ", "The clerk wrote that ",
         "It is true that ",
         "As everyone knows, ", "In these parts they say that ", "There is no doubt that "]
TAILS = [", or so the neighbours say", ", as the old book says", ", and that is all", ", if the records are right",
         ", to the surprise of many", ", just as before", ", and nobody minds", ", as any child can tell you"]
SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Turn:
    """A question, its answer, and the spans (start, end) of the answer's characters that only the text can tell."""
    question: str
    answer: str                 # begins with the space that follows "Answer:"
    values: tuple


@dataclass(frozen=True)
class Document:
    """A chronicle and its questions. `prompt`, `answer` and `values` are those of the first question."""
    body: str
    turns: tuple
    people: tuple

    @property
    def prompt(self):
        return f"{self.body}Question: {self.turns[0].question}\nAnswer:"

    @property
    def answer(self):
        return self.turns[0].answer

    @property
    def values(self):
        return self.turns[0].values

    @property
    def text(self):
        """All of it, each answer ended by END: what is trained on."""
        return self.body + "\n\n".join(f"Question: {t.question}\nAnswer:{t.answer}{END}" for t in self.turns)

    @property
    def chat(self):
        """The same as a conversation, in the form of tokenizer_config.json's template without thinking."""
        turns = [f"Question: {t.question}\nAnswer:<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
                 f"{t.answer.strip()}<|im_end|>\n" for t in self.turns]
        return f"<|im_start|>user\n{self.body}" + "<|im_start|>user\n".join(turns)


def pick(rng, items):
    """One of `items`. Plain rng.random() keeps documents the same in every Python version, and is fast."""
    return items[int(rng.random() * len(items))]


def shuffled(rng, items):
    return sorted(items, key=lambda _: rng.random())


@lru_cache(maxsize=None)
def parse(template):
    """A template as alternating literal text and slot names."""
    return SLOT.split(template)


def expand(rng, template, people=()):
    """Fill a template's slots. A slot with a capital gives a capital; {Person} is one of `people`."""
    parts = list(parse(template))
    for i in range(1, len(parts), 2):
        slot = parts[i]
        if slot == "Person":
            parts[i] = pick(rng, people)
        elif slot in POOLS:
            word = pick(rng, POOLS[slot])
            parts[i] = expand(rng, word) if "{" in word else word
        else:
            word = expand(rng, pick(rng, POOLS[slot.lower()]))
            parts[i] = word[0].upper() + word[1:]
    return "".join(parts)


def fill(template, words):
    """A template with the given words -> (sentence, spans of the words in it). The first word is the person's name."""
    parts, spans, at = list(parse(template)), [], 0
    for i, part in enumerate(parts):
        if i % 2:
            part = parts[i] = words[i // 2]
            spans.append((at, at + len(part)))
        at += len(part)
    return "".join(parts), spans


def make_names(rng, count):
    """`count` names, no two of which begin alike."""
    return [onset + pick(rng, ENDINGS) for onset in shuffled(rng, ONSETS)[:count]]


def tell(rng, kind, words):
    """A fact as the chronicle words it."""
    sentence = fill(pick(rng, FACTS[kind][1]), words)[0]
    lead = pick(rng, LEADS) if rng.random() < 0.3 else ""
    tail = pick(rng, TAILS) if rng.random() < 0.4 else ""
    return f"{lead}{sentence}{tail}."


def ask(kinds, names, facts):
    """The question for these kinds of facts of one or two people, with its answer."""
    who = " and ".join(names)
    if len(kinds) == len(FACTS):
        question = f"What do we know about {who}?"
    else:
        listed = [f"the {kind}" for kind in kinds]
        question = f"What are {', '.join(listed[:-1])} and {listed[-1]} of {who}?"
    answer, values = "", []
    for name in names:
        for kind in kinds:
            answer += " "
            sentence, spans = fill(FACTS[kind][0], facts[name, kind])
            values += [(start + len(answer), end + len(answer)) for start, end in spans[1:]]
            answer += sentence
    return Turn(question, answer, tuple(values))


def paragraphs(rng, blocks):
    """Join blocks of sentences: most into paragraphs, a few by a mere line break. Ends with a blank line."""
    text = []
    for block in blocks:
        text += [" ".join(block), "\n" if rng.random() < 0.1 else "\n\n"]
    return "".join(text[:-1]) + "\n\n"


def make_document(seed, length, layout, questions=1, people=None):
    """A document of about `length` tokens, prompt and answers together. Deterministic.

    layout "clustered" or "scattered". Each question is about one or two people, everything known or some kinds of
    facts, and no person is asked about twice; with one question it is everything known. `people` is the number of
    people, by default growing with the length. Raises ValueError for another layout, or if the facts do not fit.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r}: must be one of {', '.join(LAYOUTS)}")
    rng = Random(seed)
    low, high = max(2, int(length / 800)), max(2, int(length / 280))
    names = make_names(rng, people or low + int(rng.random() * (high - low + 1)))
    facts = {(name, kind): [name] + [expand(rng, "{" + slot + "}") for slot in parse(FACTS[kind][0])[3::2]]
             for name in names for kind in FACTS}

    told = [[tell(rng, kind, facts[name, kind]) for kind in shuffled(rng, FACTS)] for name in names]
    budget = length * CHARS_PER_TOKEN - sum(len(sentence) + 1 for block in told for sentence in block)

    turns, order = [], shuffled(rng, names)
    while order and len(turns) < questions:
        count = 2 if length >= 1000 and rng.random() < 0.25 else 1
        some = questions > 1 and rng.random() < 0.3
        kinds = shuffled(rng, FACTS)[: 2 + int(rng.random() * 3)] if some else list(FACTS)
        turn = ask(kinds, order[:count], facts)
        cost = len(turn.question) + len(turn.answer) + FRAME
        if turns and cost > budget:
            break
        turns.append(turn)
        order, budget = order[count:], budget - cost
    if budget < 0:
        raise ValueError(f"{len(names)} people do not fit into {length} tokens")

    filler = []
    while budget > 0:
        filler.append(expand(rng, pick(rng, FILLER), names))
        budget -= len(filler[-1]) + 1.2

    if layout == "clustered":
        blocks = told
    else:                       # each fact becomes part of the stream of filler, at places as different as there are
        sentences = shuffled(rng, [sentence for block in told for sentence in block])
        places = shuffled(rng, range(len(filler) + 1))
        places = sorted(places[i % len(places)] for i in range(len(sentences)))
        for place, sentence in reversed(list(zip(places, sentences))):
            filler.insert(place, sentence)
        blocks = []
    blocks = list(blocks)
    while filler:
        size = 3 + int(rng.random() * 6)
        blocks.append(filler[:size])
        filler = filler[size:]
    if layout == "clustered":
        blocks = shuffled(rng, blocks)
    return Document(paragraphs(rng, blocks), tuple(turns), tuple(names))


def value_tokens(document, offsets):
    """Which tokens of prompt + answer hold each value of the answer.

    offsets: (start, end) in characters of each token of `document.prompt + document.answer` -> a list of token indices
    for each value. The token at such an index is to be predicted from those before it.
    """
    return span_tokens(document.values, offsets, len(document.prompt))


def span_tokens(spans, offsets, at):
    """The indices of the tokens that touch each span (start, end) of the characters from `at` on -> a list per span."""
    return [[i for i, (start, end) in enumerate(offsets) if start < at + stop and end > at + first]
            for first, stop in spans]


def right_values(turn, written):
    """Which values of the answer a written answer states rightly -> list of bool.

    Sentence by sentence: the written sentence of the same number must have the answer's own wording.
    """
    right, at = [], 0
    written = (" " + written.strip().rstrip(".")).split(". ")
    for number, sentence in enumerate(turn.answer.rstrip(".").split(". ")):
        spans = [(start - at, end - at) for start, end in turn.values if at <= start < at + len(sentence)]
        pattern, done = "", 0
        for start, end in spans:
            pattern += re.escape(sentence[done:start]) + "(.+?)"
            done = end
        match = re.fullmatch(pattern + re.escape(sentence[done:]), written[number]) if number < len(written) else None
        right += [bool(match) and match[i + 1] == sentence[start:end] for i, (start, end) in enumerate(spans)]
        at += len(sentence) + 2
    return right


def write_examples(folder):
    """The example prompts, from held-out seeds, each with its true answer beside it. No newline ends a prompt."""
    for name, seed, length, layout in (("1k", 19, 1000, "clustered"), ("4k", 12, 4000, "scattered"),
                                       ("8k", 15, 8000, "scattered")):
        document = make_document(seed, length, layout)
        (folder / f"{name}.txt").write_text(document.prompt, encoding="utf-8")
        (folder / f"{name}.answer.txt").write_text(document.answer.strip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:]:
        document = make_document(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
        print(document.prompt + document.answer)
    else:
        write_examples(Path(__file__).parent.parent / "examples")
