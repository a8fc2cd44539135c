"""Synthetic prompts: short stories, simple questions, explanations and dialogues.

Every prompt comes with a one-or-two sentence "plan" that is later used as the
text of the reasoning channel (`to=self`), so that the student model learns the
difference between `Reasoning strength: low` (no plan) and the other levels.
"""

import random

CHARACTERS = """rabbit|fox|bear|cat|dog|mouse|owl|frog|duck|turtle|squirrel|hedgehog|lion|elephant|monkey|penguin|whale|pony|sheep|bee|butterfly|ant|snail|goat|pig|robot|dragon|fairy|wizard|princess|prince|pirate|farmer|baker|doctor|teacher|gardener|painter|sailor|king|queen|giant|grandmother|grandfather|little girl|little boy|baby bird|ladybug|kitten|puppy|deer|wolf|crow|parrot|dolphin|crab|fish|firefly|snowman|toy soldier|teddy bear|train driver|firefighter|astronaut""".split(
    "|"
)
ADJECTIVES = """small|brave|shy|kind|lazy|clever|curious|hungry|sleepy|happy|sad|lonely|funny|proud|gentle|noisy|quiet|tiny|old|young|silly|friendly|grumpy|careful|cheerful""".split(
    "|"
)
NAMES = """Tom|Lily|Max|Anna|Ben|Mia|Sam|Lucy|Leo|Ella|Jack|Sue|Tim|Rosie|Oscar|Daisy|Finn|Nora|Milo|Ruby|Pip|Bella|Charlie|Molly|Hugo|Zoe|Felix|Ivy|Otto|Amy|Buddy|Coco""".split(
    "|"
)
PLACES = """in the forest|by the sea|on a farm|in a big city|on a mountain|in a garden|at school|in a castle|on an island|by the river|in a small village|in the snow|in the desert|at the zoo|in the park|in a cave|on a boat|in space|under the sea|at the market|in the kitchen|in a tree house|by the lake|in the jungle|on the moon|in a library|at the beach|in a meadow|in the rain|on a train""".split(
    "|"
)
OBJECTS = """red ball|magic stone|lost key|golden egg|kite|little boat|warm hat|big cake|shiny coin|old map|music box|blue flower|broken toy|lantern|book of stories|basket of apples|silver bell|wooden box|paper plane|drum|seed|star|letter|umbrella|bicycle|balloon|honey pot|feather|mirror|sandwich|pair of boots|blanket|telescope|ring|puzzle""".split(
    "|"
)
LESSONS = """sharing|being kind|telling the truth|being brave|helping others|being patient|saying sorry|friendship|working together|never giving up|listening|being careful|taking turns|saying thank you|trying new things|being yourself|caring for nature|learning from mistakes""".split(
    "|"
)
TOPICS = """rain|snow|the moon|the sun|the stars|a rainbow|wind|thunder|the ocean|a volcano|a river|a mountain|a desert|a forest|plants|flowers|seeds|trees|bees|honey|butterflies|birds|fish|dogs|cats|horses|cows|elephants|lions|penguins|whales|dinosaurs|spiders|ants|frogs|the heart|the brain|teeth|bones|sleep|dreams|food|bread|milk|water|ice|fire|light|shadows|sound|music|a piano|a drum|colors|numbers|time|a clock|the seasons|winter|summer|a car|a train|an airplane|a boat|a bicycle|a bridge|a house|a school|a library|a hospital|a farm|a city|money|a map|a computer|a robot|a telephone|electricity|a magnet|gravity|space|a rocket|a planet|an astronaut|recycling|weather|clouds|the wind|a garden|soup|a cake|friendship|kindness|courage|honesty|family|a holiday|a birthday|sports|football|swimming|painting|dancing|reading|writing|a story""".split(
    "|"
)
WHY = """is the sky blue|do birds fly south|do we sleep|do leaves fall|do cats purr|do dogs bark|does it rain|do we eat vegetables|do we brush our teeth|do bees make honey|does ice melt|do we go to school|do plants need water|do we say thank you|does the moon change shape|do we wear coats in winter|do people read books|do we need the sun|do fish live in water|do we need friends|do we wash our hands|do boats float|do stars shine|do we laugh|do we cry|do bears sleep in winter|do we need trees|do people dance|is the sea salty|do we have two eyes""".split(
    "|"
)
ACTIVITIES = """making a new friend|learning to read|growing a plant|baking a cake|riding a bicycle|keeping a room tidy|going to bed early|drawing an animal|staying healthy|saving water|having a picnic|planning a birthday party|taking care of a dog|taking care of a cat|learning to swim|writing a letter|being kind at school|cooking soup|building a sandcastle|playing outside|helping at home|telling a good story|feeling calm|learning a song|packing a bag""".split(
    "|"
)
THINGS = """animals|fruits|vegetables|colors|toys|games|flowers|birds|things in the sky|things in a kitchen|things in a school bag|jobs|sports|things that fly|things that are cold|things that are red|sea animals|farm animals|musical instruments|things to do on a rainy day""".split(
    "|"
)


def a(noun):
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def _story(r):
    who, adj, name = r.choice(CHARACTERS), r.choice(ADJECTIVES), r.choice(NAMES)
    place, obj, lesson = r.choice(PLACES), r.choice(OBJECTS), r.choice(LESSONS)
    hero = a(f"{adj} {who}")
    named = f"{hero} named {name}"
    prompt = r.choice(
        [
            f"Write a short story about {hero} {place}.",
            f"Tell me a story about {named} who finds {a(obj)} {place}.",
            f"Tell me a short story about {hero} and {a(obj)}.",
            f"Write a story for children about {named}. The story should teach about {lesson}.",
            f"Please tell me a bedtime story about {named} {place}.",
            f"Write a simple story about {hero} who learns about {lesson}.",
            f"Can you tell me a story about {a(obj)} {place}?",
            f"Write a short story that begins with: Once upon a time, there was {named}.",
            f"Tell a story about {name} and {hero} who live {place}.",
            f"Write a funny story about {hero} who lost {a(obj)}.",
        ]
    )
    plans = [f"The user wants a story about {a(obj)}. I will keep it short and simple."]
    if hero in prompt:
        plans = [
            f"The user wants a story about {hero}. I will use simple words and a happy ending.",
            f"I will write a short story about {a(who)}.",
        ]
        if place in prompt:
            plans.append(f"A story about {a(who)}. It happens {place}. I will keep it short.")
        if lesson in prompt:
            plans.append(f"I will write about {hero}. The lesson is about {lesson}.")
        if obj in prompt:
            plans.append(f"A story about {a(who)} and {a(obj)}. I will use simple words.")
    plan = r.choice(plans)
    return prompt, plan


def _explain(r):
    t = r.choice(TOPICS)
    prompt = r.choice(
        [
            f"Explain {t} in simple words.",
            f"What can you tell me about {t}?",
            f"Tell me about {t} in a few sentences.",
            f"Describe {t} to a young child.",
            f"Write a short text about {t}.",
        ]
    )
    return prompt, f"The user asks about {t}. I will explain it in simple words."


def _why(r):
    w = r.choice(WHY)
    prompt = r.choice(
        [
            f"Why {w}?",
            f"Can you explain why {w}?".replace("why is the sky", "why the sky is"),
            f"My child asks: why {w}?",
        ]
    )
    return prompt, f"The question is why {w}. I will give a short and clear answer."


def _dialogue(r):
    x, y, t = r.choice(CHARACTERS), r.choice(CHARACTERS), r.choice(TOPICS + [a(o) for o in OBJECTS])
    prompt = r.choice(
        [
            f"Write a short conversation between {a(x)} and {a(y)} about {t}.",
            f"Write a dialogue in which {a(x)} asks {a(y)} about {t}.",
        ]
    )
    return prompt, f"I will write a talk between {a(x)} and {a(y)}. They speak about {t}."


def _list(r):
    if r.random() < 0.5:
        act = r.choice(ACTIVITIES)
        n = r.choice(["three", "four", "five"])
        return (
            r.choice([f"Give me {n} tips for {act}.", f"How do I start {act}?", f"Write a short guide to {act}."]),
            f"The user wants help with {act}. I will give clear steps.",
        )
    th, n = r.choice(THINGS), r.choice(["three", "four", "five"])
    return (
        r.choice([f"Name {n} {th}.", f"List {n} {th} and say something about each one."]),
        f"I need to name {n} {th}.",
    )


def make(n, seed):
    """Return n distinct-ish (prompt, plan) pairs; stories dominate."""
    r = random.Random(seed)
    kinds = [(_story, 0.66), (_explain, 0.12), (_why, 0.05), (_dialogue, 0.11), (_list, 0.06)]
    fns, w = [k for k, _ in kinds], [p for _, p in kinds]
    return [r.choices(fns, w)[0](r) for _ in range(n)]


# --- tool-use conversations (fully templated, no teacher involved) -----------------------------
CITIES = """Paris|London|Rome|Berlin|Madrid|Tokyo|Oslo|Cairo|Lima|Boston|Dublin|Vienna|Prague|Athens|Delhi|Sydney|Toronto|Chicago|Lisbon|Warsaw""".split(
    "|"
)
WEATHER = [
    ("sunny", "take a hat"),
    ("rainy", "take an umbrella"),
    ("windy", "hold on to your hat"),
    ("cloudy", "take a light coat"),
    ("snowy", "wear warm boots"),
]
WEATHER_TOOL = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TIME_TOOL = {
    "name": "get_time",
    "description": "Get the local time of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def tool_conversation(r):
    """Return (messages, tools) for the real chat template."""
    city = r.choice(CITIES)
    tools = r.choice([[WEATHER_TOOL], [WEATHER_TOOL, TIME_TOOL], [TIME_TOOL, WEATHER_TOOL], [TIME_TOOL]])
    names = [t["name"] for t in tools]
    name = r.choice(names)
    if name == "get_weather":
        sky, advice = r.choice(WEATHER)
        deg = r.randint(-5, 35)
        q = r.choice(
            [f"What is the weather in {city}?", f"How is the weather in {city} today?", f"Do I need a coat in {city}?"]
        )
        result = f'{{"city": "{city}", "sky": "{sky}", "degrees": {deg}}}'
        answer = f"It is {sky} in {city} today, and the temperature is {deg} degrees. You should {advice}."
    else:
        hh, mm = r.randint(0, 23), r.randint(0, 59)
        q = r.choice([f"What time is it in {city}?", f"Tell me the time in {city}."])
        result = f'{{"city": "{city}", "time": "{hh:02d}:{mm:02d}"}}'
        answer = f"It is {hh:02d}:{mm:02d} in {city} now."
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": {"city": city}}}
    plan = f"I need to call {name} for {city}."
    msgs = [
        {"role": "user", "content": q},
        {"role": "assistant", "reasoning_content": plan, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": result},
        {"role": "assistant", "content": answer},
    ]
    return msgs, tools
