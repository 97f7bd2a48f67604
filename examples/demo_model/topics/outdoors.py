"""Questions of the way out of the house: weather, directions, opening hours, trips, sport, plants."""

from examples.demo_model.topics.topic import Topic, Voice


def _air(celsius: int, fahrenheit: int, wear: str, feel: str) -> dict[str, str | tuple[str, str]]:
    return {"temp": (f"{celsius} °C", f"{fahrenheit} °F"), "wear": wear, "feel": feel}


WEATHER = Topic(
    name="weather",
    weight=2.0,
    has_units=True,
    questions=(
        "It is {temp} and {sky} outside. What should I wear?",
        "The forecast says {temp} and {sky}. [What do I put on?|What clothes do I need?]",
        "What [should|can] I wear when it is {sky} and {temp}?",
        "We have {temp} and it is {sky}. [Do I need a coat?|How do I dress?]",
    ),
    follow_ups=("And if it is {sky} and {temp}?", "What about {temp} and {sky}?"),
    slots=(
        (
            _air(-5, 23, "a thick coat, gloves", "freezing"),
            _air(0, 32, "a winter coat, a scarf", "very cold"),
            _air(5, 41, "a warm coat", "cold"),
            _air(10, 50, "a jacket", "cool"),
            _air(15, 59, "a light jacket", "fresh"),
            _air(20, 68, "a thin sweater", "mild"),
            _air(25, 77, "a shirt", "warm"),
            _air(30, 86, "shorts", "hot"),
            _air(35, 95, "loose cotton clothes", "very hot"),
        ),
        (
            {"sky": "rainy", "take": "an umbrella"},
            {"sky": "sunny", "take": "sunglasses"},
            {"sky": "windy", "take": "a tight hat"},
            {"sky": "foggy", "take": "something bright"},
            {"sky": "cloudy", "take": "a spare layer"},
        ),
    ),
    formal=Voice(
        core=(
            "At {temp}, I [recommend|would recommend|would suggest] {wear} and {take}.",
            "It is {feel} at {temp}, therefore {wear} and {take} are advisable.",
            "As it is {sky} at {temp}, you may wish to take {wear} and {take}.",
        ),
        extra=(
            "Please note that {sky} weather can make {temp} seem different from what one expects.",
            "I would also suggest comfortable shoes, should you intend to walk.",
            "It is advisable to consult the forecast once more prior to leaving the house.",
            "Kindly remember to take sufficient water if you will be outside for several hours.",
        ),
    ),
    casual=Voice(
        core=(
            "{temp} is {feel}, so just [grab|throw on] {wear} and {take}!",
            "Yeah, {temp} and {sky}, grab {wear} and {take}.",
            "It's {feel} at {temp}, so go for {wear} and {take}!",
        ),
        extra=(
            "When it's {sky}, {temp} can feel kinda different from what you'd think.",
            "Comfy shoes are a good call too if you're gonna walk.",
            "Check the forecast again before you head out, it's always changing.",
            "If you're out for a few hours, don't forget to bring some water.",
        ),
    ),
)


def _way(metric: str, imperial: str, walk: int, hint: str) -> dict[str, str | tuple[str, str]]:
    return {"far": (metric, imperial), "walk": f"{walk} minutes", "hint": hint}


WAY = Topic(
    name="way",
    weight=1.6,
    has_units=True,
    questions=(
        "The {place} is {far} {side} of here. How do I get there?",
        "How do I get to the {place}? It is {far} {side} of here.",
        "Can I walk to the {place}, {far} {side} of here?",
        "I need to go to the {place}, which is {far} to the {side}. [Which way?|How long is the walk?]",
    ),
    follow_ups=("And the {place}, {far} {side} of here?", "What about the {place}? It is {far} to the {side}."),
    slots=(
        tuple(
            {"place": place}
            for place in (
                [
                    "station",
                    "museum",
                    "library",
                    "market",
                    "harbour",
                    "hospital",
                    "pharmacy",
                    "park",
                    "town hall",
                    "school",
                ]
            )
        ),
        tuple({"side": side} for side in ("north", "south", "east", "west")),
        (
            _way("500 metres", "550 yards", 6, "on foot"),
            _way("1 km", "0.6 miles", 12, "on foot"),
            _way("2 km", "1.2 miles", 25, "on foot"),
            _way("3 km", "1.9 miles", 40, "by bicycle"),
            _way("5 km", "3.1 miles", 60, "by bicycle"),
            _way("8 km", "5 miles", 95, "by bus"),
        ),
    ),
    formal=Voice(
        core=(
            "Please go {side} for {far}, and you will reach the {place}.",
            "I [recommend|would suggest] going {side} for {far}[| to the {place}], preferably {hint}.",
            "The {place} is {far} to the {side}, approximately {walk} on foot.",
        ),
        extra=(
            "The walk requires approximately {walk} at a moderate pace.",
            "Should the {place} be difficult to find, please do not hesitate to ask a passer-by.",
            "I would suggest travelling {hint}, as this is the most suitable option for {far}.",
            "Kindly observe the signs along the road, which are clear and easy to follow.",
        ),
    ),
    casual=Voice(
        core=(
            "Just head {side} for {far} and you're at the {place}!",
            "Yeah, it's {far} {side}, so just go {hint}.",
            "The {place}? Just {far} {side}, that's like {walk} on foot.",
        ),
        extra=(
            "It's like {walk} on foot if you don't rush.",
            "If you can't spot the {place}, just ask somebody on the street.",
            "For {far} I'd go {hint}, that's the easiest way.",
            "Keep an eye on the signs, you can't really miss them.",
        ),
    ),
)

_HOURS_QUESTIONS = (
    "The {shop} opens at {opens} and closes at {closes}. Is it open at {at}?",
    "The {shop} is open from {opens} to {closes}. Can I go there at {at}?",
    "Can I visit the {shop} at {at}? It opens at {opens} and closes at {closes}.",
)
_HOURS = (
    tuple(
        {"shop": shop} for shop in ("bakery", "library", "bank", "pharmacy", "museum", "post office", "pool", "shop")
    ),
    tuple({"closes": closes} for closes in ("5 pm", "6 pm", "7 pm", "8 pm")),
    tuple({"opens": opens} for opens in ("8 am", "9 am", "10 am")),
)
OPEN = Topic(
    name="open",
    weight=0.7,
    questions=_HOURS_QUESTIONS,
    slots=(*_HOURS, tuple({"at": at} for at in ("11 am", "noon", "1 pm", "2 pm", "3 pm", "4 pm"))),
    formal=Voice(
        core=(
            "Yes, the {shop} will be open at {at}, [you may go|you are welcome to go] there.",
            "Yes, you may visit the {shop} at {at}, as it is open until {closes}.",
        ),
        extra=(
            "Please note that the {shop} closes at {closes}, and late visitors are not admitted.",
            "I would suggest arriving early, as it is often crowded near the end of the day.",
            "It is advisable to verify the hours in advance, should the day be a holiday.",
        ),
    ),
    casual=Voice(
        core=(
            "Yep, the {shop}'s open at {at}, go for it!",
            "Yeah, {at} is fine, it's open until {closes}.",
        ),
        extra=(
            "The {shop} shuts at {closes}, so don't cut it too close.",
            "I'd go a bit early, it's pretty packed near the end of the day.",
            "If it's a holiday, just give them a quick call first.",
        ),
    ),
)
CLOSED = Topic(
    name="closed",
    weight=0.7,
    questions=_HOURS_QUESTIONS,
    slots=(*_HOURS, tuple({"at": at} for at in ("6 am", "7 am", "9 pm", "10 pm", "11 pm", "midnight"))),
    formal=Voice(
        core=(
            "No, I regret that the {shop} will be closed at {at}.",
            "Unfortunately, the {shop} is not open at {at}, as it closes at {closes}.",
        ),
        extra=(
            "Please visit the {shop} between {opens} and {closes} instead.",
            "I would suggest arriving shortly after {opens}, when it is usually quiet.",
            "It is advisable to verify the hours in advance, should the day be a holiday.",
        ),
    ),
    casual=Voice(
        core=(
            "Nope, the {shop}'s closed at {at}, sorry!",
            "No luck, it's not open at {at}, the {shop} shuts at {closes}.",
        ),
        extra=(
            "Just swing by between {opens} and {closes} and you're good.",
            "I'd go right after {opens}, it's pretty quiet then.",
            "If it's a holiday, just give them a quick call first.",
        ),
    ),
)

TRIP = Topic(
    name="trip",
    weight=1.2,
    has_units=True,
    questions=(
        "What should I pack for {days} {goal}?",
        "I am going away for {days} {goal}. [What do I need?|Any packing tips?]",
        "Help me pack for {days} {goal}.",
    ),
    follow_ups=("And for {days} {goal}?", "What about {days} {goal}?"),
    slots=(
        (
            {"days": "two days", "load": ("5 kg", "11 pounds")},
            {"days": "four days", "load": ("8 kg", "18 pounds")},
            {"days": "a week", "load": ("12 kg", "26 pounds")},
            {"days": "two weeks", "load": ("20 kg", "44 pounds")},
        ),
        (
            {"goal": "at the beach", "must": "a swimsuit and sun cream"},
            {"goal": "in the mountains", "must": "hiking boots and a rain jacket"},
            {"goal": "in the city", "must": "comfortable shoes and a map"},
            {"goal": "in the forest", "must": "a torch and insect spray"},
            {"goal": "by the lake", "must": "a towel and a warm sweater"},
            {"goal": "in the snow", "must": "warm socks and gloves"},
        ),
    ),
    formal=Voice(
        core=(
            "I [recommend|would recommend] packing {must}, in total [at most|no more than] {load}.",
            "Please pack {must}, and keep the luggage under {load}.",
            "For {days}, {must} and up to {load} of luggage are sufficient.",
        ),
        extra=(
            "You may wish to roll the clothes, as this requires considerably less space.",
            "Please keep documents and medicine in a small bag that remains with you.",
            "It is advisable to weigh the luggage, which should not exceed {load}.",
            "For {days} {goal}, one additional set of clothes is entirely sufficient.",
        ),
    ),
    casual=Voice(
        core=(
            "Just grab {must} and keep it under {load}.",
            "You'll want {must}, and don't go over {load}!",
            "{must}, that's the main stuff, and {load} is plenty!",
        ),
        extra=(
            "Roll your clothes up, it's a neat trick and saves tons of space.",
            "Keep your papers and meds in a small bag so you don't lose them.",
            "Put the bag on a scale, you don't wanna lug around more than {load}.",
            "For {days} {goal} you really don't need more than one spare outfit.",
        ),
    ),
)


def _sport(sport: str, metric: str, imperial: str, often: str) -> dict[str, str | tuple[str, str]]:
    return {"sport": sport, "goal": (metric, imperial), "often": often}


SPORT = Topic(
    name="sport",
    weight=1.2,
    has_units=True,
    questions=(
        "How do I start {sport}?",
        "I want to begin {sport}. [Any advice?|Where do I start?]",
        "What is a good plan for {sport}?",
        "How far should a beginner go when {sport}?",
    ),
    follow_ups=("And {sport}?", "What about {sport}?"),
    slots=(
        (
            _sport("running", "3 km", "2 miles", "three times a week"),
            _sport("swimming", "400 metres", "440 yards", "twice a week"),
            _sport("cycling", "10 km", "6 miles", "three times a week"),
            _sport("rowing", "2 km", "1.2 miles", "twice a week"),
            _sport("hiking", "8 km", "5 miles", "once a week"),
            _sport("walking", "4 km", "2.5 miles", "every day"),
        ),
    ),
    formal=Voice(
        core=(
            "I [recommend|would recommend] {sport} {goal} {often}.",
            "Please begin with {goal} of {sport} {often}.",
            "It is [sufficient|advisable] to begin {sport} with {goal} {often}.",
        ),
        extra=(
            "Please increase the distance gradually, and do not exceed {goal} in the first weeks.",
            "It is important to warm up for five minutes prior to {sport}.",
            "Should you experience pain, I would suggest a pause of several days.",
            "You may record your progress, as this provides additional motivation.",
        ),
    ),
    casual=Voice(
        core=(
            "Just go {sport}, like {goal} {often}!",
            "Start small, {goal} {often} is super fine.",
            "{goal} of {sport} {often}, and you'll be hooked!",
        ),
        extra=(
            "Don't go crazy, just stick to {goal} for the first few weeks.",
            "Warm up for five minutes before {sport}, your legs'll thank you.",
            "If something hurts, don't push it, just chill for a few days.",
            "Jot down how it's going, it's pretty cool to see the progress.",
        ),
    ),
)


def _plant(plant: str, metric: str, imperial: str, often: str, light: str) -> dict[str, str | tuple[str, str]]:
    return {"plant": plant, "water": (metric, imperial), "often": often, "light": light, "deep": ("3 cm", "1 inch")}


PLANT = Topic(
    name="plant",
    weight=1.6,
    has_units=True,
    questions=(
        "How often [do|should] I water {plant}?",
        "How do I take care of {plant}?",
        "How much water does {plant} need?",
        "I bought {plant}. [Any advice?|How do I keep it alive?]",
    ),
    follow_ups=("And {plant}?", "What about {plant}?"),
    slots=(
        (
            _plant("a cactus", "100 ml", "3 fluid ounces", "every three weeks", "full sun"),
            _plant("a fern", "250 ml", "1 cup", "every three days", "shade"),
            _plant("an orchid", "100 ml", "3 fluid ounces", "once a week", "soft light"),
            _plant("a basil plant", "150 ml", "5 fluid ounces", "every two days", "full sun"),
            _plant("a tomato plant", "1 litre", "1 quart", "every day", "full sun"),
            _plant("an aloe plant", "200 ml", "7 fluid ounces", "every two weeks", "bright light"),
            _plant("a mint plant", "250 ml", "1 cup", "every two days", "half shade"),
            _plant("a rose bush", "2 litres", "2 quarts", "twice a week", "full sun"),
            _plant("an ivy", "200 ml", "7 fluid ounces", "once a week", "shade"),
        ),
    ),
    formal=Voice(
        core=(
            "I [recommend|would recommend] giving {plant} {water} of water {often}.",
            "Please water {plant} {often} with [approximately|about] {water}.",
            "It is [sufficient|best] to give {plant} {water} {often}.",
        ),
        extra=(
            "Please place it in {light}, which it requires for healthy growth.",
            "You may check the soil at a depth of {deep}, and water only if it is dry.",
            "It is important that excess water can drain, as the roots do not tolerate it.",
            "I would suggest less water in winter, when the plant is resting.",
        ),
    ),
    casual=Voice(
        core=(
            "Just give {plant} {water} {often}.",
            "{water} of water {often}, and it's happy!",
            "Yeah, {plant} just wants {water} of water {often}.",
        ),
        extra=(
            "Stick it in {light}, that's what it loves.",
            "Poke a finger in about {deep} deep, and if it's wet, just wait a bit.",
            "Don't let it sit in water, soggy roots aren't cool.",
            "It's kinda asleep in winter, so don't water it that much then.",
        ),
    ),
)

TOPICS = (WEATHER, WAY, OPEN, CLOSED, TRIP, SPORT, PLANT)
