"""Single turn: short questions of general knowledge with short answers in a form that the prompt specifies.

Invariant: the reward is `RIGHT` if the reply names an accepted answer and no other answer of its family, plus `ENDED`
if the policy ended its turn within `max_tokens`. Several answers are wrong, so lists of guesses do not pay; words of
the question do not count.

    What is the capital of France? Answer with the name only.   ->   Paris                            1.0
                                                                     The capital of France is Paris.  1.0
                                                                     Rome, Paris or Berlin            0.2
                                                                     The capital of France, which is  0.0

`environment/exact` is the share of replies that are only an answer, as the prompt requires: form apart from knowledge.

The families of `OTHER_FAMILIES` require a sentence, an explanation, a greeting. They are for an evaluation set during
training that detects lost abilities. Their reward is 1 or 0.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from roundhouse.environments.base import TaskRow, Verdict, closing_text
from roundhouse.environments.generated import GeneratedEnvironment, Message, says

RIGHT, ENDED = 0.8, 0.2
LARGEST_SUMMAND = 15
SENTENCE_WORDS = 5
"""The fewest words of a sentence."""

Fact = tuple[str, tuple[str, ...]]
"""A subject and its right answers."""


@dataclass(frozen=True, slots=True)
class Question:
    """One task; `answers` are equally right."""

    family: str
    subject: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """Questions of one form."""

    prompt: str
    """With `{}` for the subject."""
    facts: Callable[[], list[Fact]]


CAPITALS = """
Afghanistan: Kabul; Albania: Tirana; Algeria: Algiers; Angola: Luanda; Argentina: Buenos Aires; Armenia: Yerevan
Australia: Canberra; Austria: Vienna; Azerbaijan: Baku; Bangladesh: Dhaka; Belarus: Minsk; Belgium: Brussels
Botswana: Gaborone; Brazil: Brasilia; Bulgaria: Sofia; Cambodia: Phnom Penh; Canada: Ottawa; Chile: Santiago
China: Beijing; Colombia: Bogota|Bogotá; Costa Rica: San Jose; Croatia: Zagreb; Cuba: Havana; Cyprus: Nicosia
the Czech Republic: Prague; Denmark: Copenhagen; Ecuador: Quito; Egypt: Cairo; Estonia: Tallinn; Ethiopia: Addis Ababa
Finland: Helsinki; France: Paris; Georgia: Tbilisi; Germany: Berlin; Ghana: Accra; Greece: Athens
Guatemala: Guatemala City; Honduras: Tegucigalpa; Hungary: Budapest; Iceland: Reykjavik|Reykjavík
India: New Delhi|Delhi; Indonesia: Jakarta; Iran: Tehran; Iraq: Baghdad; Ireland: Dublin; Italy: Rome
Jamaica: Kingston; Japan: Tokyo; Jordan: Amman; Kenya: Nairobi; Kuwait: Kuwait City; Latvia: Riga; Lebanon: Beirut
Libya: Tripoli; Lithuania: Vilnius; Madagascar: Antananarivo; Malaysia: Kuala Lumpur; Mali: Bamako; Malta: Valletta
Mexico: Mexico City; Mongolia: Ulaanbaatar|Ulan Bator; Morocco: Rabat; Mozambique: Maputo; Namibia: Windhoek
Nepal: Kathmandu; the Netherlands: Amsterdam; New Zealand: Wellington; Nicaragua: Managua; Niger: Niamey
Nigeria: Abuja; North Korea: Pyongyang; Norway: Oslo; Oman: Muscat; Pakistan: Islamabad; Panama: Panama City
Paraguay: Asuncion|Asunción; Peru: Lima; the Philippines: Manila; Poland: Warsaw; Portugal: Lisbon; Qatar: Doha
Romania: Bucharest; Russia: Moscow; Rwanda: Kigali; Saudi Arabia: Riyadh; Senegal: Dakar; Serbia: Belgrade
Slovakia: Bratislava; Slovenia: Ljubljana; Somalia: Mogadishu; South Korea: Seoul; Spain: Madrid; Sudan: Khartoum
Sweden: Stockholm; Syria: Damascus; Thailand: Bangkok; Tunisia: Tunis; Turkey: Ankara; Uganda: Kampala
Ukraine: Kyiv|Kiev; the United Kingdom: London; Uruguay: Montevideo
the United States: Washington|Washington, D.C.|Washington DC|Washington D.C.|Washington, DC; Uzbekistan: Tashkent
Venezuela: Caracas; Vietnam: Hanoi; Yemen: Sanaa|Sana'a; Zambia: Lusaka; Zimbabwe: Harare
"""

CONTINENTS = """
Argentina: South America; Austria: Europe; Bangladesh: Asia; Belgium: Europe; Bolivia: South America
Brazil: South America; Bulgaria: Europe; Cambodia: Asia; Cameroon: Africa; Canada: North America; Chad: Africa
Chile: South America; China: Asia; Colombia: South America; Croatia: Europe; Denmark: Europe; Ecuador: South America
Ethiopia: Africa; Finland: Europe; France: Europe; Germany: Europe; Ghana: Africa; Greece: Europe; Hungary: Europe
India: Asia; Iran: Asia; Iraq: Asia; Ireland: Europe; Italy: Europe; Japan: Asia; Kenya: Africa; Laos: Asia
Libya: Africa; Madagascar: Africa; Malaysia: Asia; Mali: Africa; Mexico: North America; Mongolia: Asia
Morocco: Africa; Mozambique: Africa; Nepal: Asia; Niger: Africa; Nigeria: Africa; Norway: Europe; Pakistan: Asia
Paraguay: South America; Peru: South America; Poland: Europe; Portugal: Europe; Romania: Europe; Rwanda: Africa
Senegal: Africa; Somalia: Africa; South Korea: Asia; Spain: Europe; Sri Lanka: Asia; Sudan: Africa; Sweden: Europe
Switzerland: Europe; Tanzania: Africa; Thailand: Asia; the Netherlands: Europe; the Philippines: Asia
the United Kingdom: Europe; the United States: North America; Tunisia: Africa; Uganda: Africa; Ukraine: Europe
Uruguay: South America; Venezuela: South America; Vietnam: Asia; Zambia: Africa
"""

OPPOSITES = """
above: below|under|beneath; absent: present; accept: reject|refuse; alive: dead; always: never; ancient: modern
arrive: leave|depart; asleep: awake; beautiful: ugly; before: after; begin: end|finish|stop; best: worst
big: small|little; bitter: sweet; black: white; bottom: top; brave: cowardly|afraid|timid|coward
bright: dark|dim|dull; buy: sell; cheap: expensive; clean: dirty; cold: hot|warm; come: go; cruel: kind
dangerous: safe; dark: light|bright; day: night; deep: shallow; defeat: victory; different: same|similar; dry: wet
early: late; east: west; easy: hard|difficult; empty: full; enemy: friend; enter: exit|leave; even: odd
everything: nothing; evil: good; exit: enter|entrance|entry; expand: shrink|contract; fail: succeed|pass; false: true
far: near|close; fast: slow; fat: thin; find: lose; first: last; forget: remember; forward: backward|backwards
freeze: melt; full: empty; future: past; generous: selfish|stingy|greedy; give: take|receive; good: bad|evil
guilty: innocent; happy: sad|unhappy; hard: soft|easy; hate: love; healthy: sick|unhealthy|ill; heaven: hell
heavy: light; hero: villain; high: low; honest: dishonest; hot: cold; huge: tiny; inside: outside; king: queen
large: small|little; laugh: cry; lazy: hardworking|active|industrious|diligent; left: right; lend: borrow; long: short
loose: tight; lost: found; loud: quiet|soft; love: hate; male: female; maximum: minimum; more: less|fewer
narrow: wide|broad; near: far; new: old; noisy: quiet|silent; north: south; old: young|new; on: off
open: closed|close|shut; over: under; peace: war; plus: minus; polite: rude|impolite; poor: rich|wealthy
positive: negative; public: private; pull: push; question: answer; quick: slow; rich: poor; rough: smooth
rural: urban; sad: happy|joyful; same: different; short: tall|long; strong: weak; tall: short; thick: thin
true: false; ugly: beautiful|pretty; up: down; victory: defeat; war: peace; wet: dry; wide: narrow; winter: summer
wrong: right; young: old
"""

COLOURS = """
a banana: yellow; a carrot: orange; a cherry: red; a cloudless sky: blue; a cornflower: blue; a crow: black
a cucumber: green; a daffodil: yellow; a fire engine: red; a flamingo: pink; a frog: green; a lemon: yellow
a lime: green; a lobster after cooking: red; a panda's ears: black; a pea: green; a pine tree: green
a polar bear: white; a pumpkin: orange; a raven: black; a ripe strawberry: red; a ripe tomato: red; a ruby: red
a sapphire: blue; a school bus in America: yellow; a stop sign: red; a sunflower: yellow; a swan: white
a tennis ball: yellow|green; a wedding dress: white; an avocado: green; an eggplant: purple; an emerald: green
an orange: orange; blood: red; broccoli: green; butter: yellow; charcoal: black; chocolate: brown; coal: black
coffee: brown|black; corn: yellow; cotton: white; fresh snow: white; grass: green; honey: yellow|gold|golden|amber
ivory: white; lavender: purple; lettuce: green; milk: white; mustard: yellow; rice: white; rust: red|orange|brown
salt: white; spinach: green; sugar: white; the ocean: blue; the sun in a child's drawing: yellow; tree bark: brown
wet soil: brown; an elephant: grey|gray; a mouse: grey|gray
"""

UNITS = """
minutes are in 1 hour: 60|sixty; seconds are in 1 minute: 60|sixty; hours are in 1 day: 24
days are in 1 week: 7|seven; months are in 1 year: 12|twelve; weeks are in 1 year: 52; days are in 1 leap year: 366
days are in an ordinary year: 365; years are in 1 decade: 10|ten; years are in 1 century: 100
years are in 1 millennium: 1000|1,000; inches are in 1 foot: 12|twelve; feet are in 1 yard: 3|three
centimetres are in 1 metre: 100; millimetres are in 1 centimetre: 10|ten; metres are in 1 kilometre: 1000|1,000
grams are in 1 kilogram: 1000|1,000; ounces are in 1 pound: 16|sixteen; pints are in 1 quart: 2|two
quarts are in 1 gallon: 4|four; cents are in 1 dollar: 100; pennies are in 1 nickel: 5|five
cents are in 1 dime: 10|ten; cents are in 1 quarter: 25; eggs are in 1 dozen: 12|twelve; items are in a pair: 2|two
millilitres are in 1 litre: 1000|1,000; kilograms are in 1 tonne: 1000|1,000; bits are in 1 byte: 8|eight
degrees are in a circle: 360; degrees are in a right angle: 90; sides has a triangle: 3|three
sides has a square: 4|four; sides has a pentagon: 5|five; sides has a hexagon: 6|six; sides has an octagon: 8|eight
legs has a spider: 8|eight; legs has an insect: 6|six; legs has a dog: 4|four; legs has a chicken: 2|two
wheels has a bicycle: 2|two; wheels has a tricycle: 3|three; wheels has a car: 4|four; strings has a violin: 4|four
letters are in the English alphabet: 26; days are in January: 31; days are in April: 30; days are in June: 30
days are in December: 31; planets are in the solar system: 8|eight; continents are there: 7|seven
players has a football team on the field: 11|eleven; colours has a rainbow: 7|seven; fingers are on 1 hand: 5|five
arms has an octopus: 8|eight; hours are in two days: 48; minutes are in half an hour: 30
seasons are in a year: 4|four; months are in half a year: 6|six
"""

SUBJECTS = """
apple bicycle bird boat bread bridge cat chair city cloud doctor dog door farmer fish flower forest garden horse house
island kitchen lamp letter library market moon mountain music night ocean painter piano rain river road school ship
shoe snow song star storm summer teacher train tree village wind window
"""

NAMES = """
Anna Ben Carla David Emma Felix Grace Henry Irene Jack Karen Leo Maria Nora Oscar Paul Rosa Simon Tina Victor
"""


def table(text: str) -> Callable[[], list[Fact]]:
    """The facts of a table of items `subject: answer`; equally right answers are separated, `grey|gray`.

    No subject occurs twice in a family.
    """

    def facts() -> list[Fact]:
        items = [item.strip().split(": ") for line in text.strip().splitlines() for item in line.split(";")]
        return [(subject, tuple(answers.split("|"))) for subject, answers in items]

    return facts


def _sums() -> list[Fact]:
    numbers = range(2, LARGEST_SUMMAND + 1)
    return [(f"{a}+{b}", (str(a + b),)) for a in numbers for b in numbers if a <= b]


def _words() -> list[Fact]:
    return [(word, (word,)) for word in SUBJECTS.split()]


FAMILIES = {
    "capitals": Family("What is the capital of {}? Answer with the name only.", table(CAPITALS)),
    "continents": Family("On which continent is {}? Answer with the name only.", table(CONTINENTS)),
    "opposites": Family('What is the opposite of "{}"? Answer with one word.', table(OPPOSITES)),
    "colours": Family("What colour is {}? Answer with one word.", table(COLOURS)),
    "sums": Family("What is {}? Answer with the number only.", _sums),
    "units": Family("How many {}? Answer with the number only.", table(UNITS)),
}
OTHER_FAMILIES = {
    "sentences": Family('Write one sentence with the word "{}".', _words),
    "explanations": Family('Explain what the word "{}" means.', _words),
    "greetings": Family("Write a short greeting to {}.", lambda: [(name, (name.lower(),)) for name in NAMES.split()]),
}


class ShortQuestions(GeneratedEnvironment[Question]):
    """The questions of `families`."""

    name = "short_questions"
    restoration = "replay"

    def __init__(
        self, families: Sequence[str] = tuple(FAMILIES), max_tokens: int = 16, heldout_fraction: float = 0.33
    ) -> None:
        self._families = {name: (FAMILIES | OTHER_FAMILIES)[name] for name in families}
        self._max_tokens = max_tokens
        facts = {name: family.facts() for name, family in self._families.items()}
        self._known = {
            name: {answer.lower() for _, answers in subjects for answer in answers} for name, subjects in facts.items()
        }
        super().__init__(
            [Question(name, subject, answers) for name, subjects in facts.items() for subject, answers in subjects],
            heldout_fraction,
        )

    def key(self, problem: Question) -> str:
        return f"{problem.family}/{problem.subject}"

    def row(self, problem: Question) -> TaskRow:
        prompt = self._families[problem.family].prompt.format(problem.subject)
        row = self.task(problem, prompt, family=problem.family, subject=problem.subject, answers=list(problem.answers))
        row["responses_create_params"]["max_output_tokens"] = self._max_tokens
        return row

    async def verify(self, session: None, row: TaskRow, response: dict[str, Any]) -> Verdict:
        family, answers = row["family"], {answer.lower() for answer in row["answers"]}
        reply = (closing_text(response) or "").lower()
        if family in OTHER_FAMILIES:
            is_met = float(is_sentence(reply) and named(reply, answers) == answers)
            return Verdict(is_met, {family: is_met})
        others = (self._known[family] | set(numbers(reply))) - named(row["subject"].lower(), self._known[family])
        names = named(reply, answers | others - set(numbers(row["subject"])))
        right = float(bool(names) and names <= answers)
        parts = {"right": RIGHT * right, "ended": ENDED * (response.get("status") != "incomplete")}
        exact = float(reply.strip().removesuffix(".") in answers)
        return Verdict(sum(parts.values()), parts, {"right": right, "exact": exact, f"right_{family}": right})

    def demonstration(self, problem: Question, right: bool, rng: random.Random) -> Iterator[Message]:
        """Return the answer alone (with words around it if a sentence is required), or another one of the family."""
        wrong = sorted(self._known[problem.family] - {answer.lower() for answer in problem.answers})
        reply = problem.answers[0] if right or not wrong else rng.choice(wrong)
        yield says(f"I would like to mention {reply}." if problem.family in OTHER_FAMILIES else reply)


def numbers(text: str) -> list[str]:
    """
    >>> numbers("7 + 10 is 1,017.")
    ['7', '10', '1,017']
    """
    return re.findall(r"\d(?:[\d,]*\d)?", text)


def named(text: str, answers: set[str]) -> set[str]:
    """Return those of `answers` that a text has as separate words. Of nested answers the longest counts.

    >>> sorted(named("the capital of niger is niamey", {"niamey", "niger", "nigeria"}))
    ['niamey', 'niger']
    """
    if not answers:
        return set()
    longest_first = sorted(answers, key=len, reverse=True)
    return set(re.findall(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", text))


def is_sentence(reply: str) -> bool:
    return len(re.findall(r"[\w']+", reply)) >= SENTENCE_WORDS
