"""Questions of the kitchen: oven, pots, tea and coffee, the fridge, what to cook."""

from examples.demo_model.topics.topic import Topic, Voice


def _oven(food: str, minutes: int, celsius: int, fahrenheit: int, sign: str) -> dict[str, str | tuple[str, str]]:
    return {
        "food": food,
        "time": f"{minutes} minutes",
        "temp": (f"{celsius} °C", f"{fahrenheit} °F"),
        "sign": sign,
    }


OVEN = Topic(
    name="oven",
    weight=2.0,
    has_units=True,
    questions=(
        "How [do|should|can] I bake {food}?",
        "How long should {food} stay in the oven?",
        "What oven temperature is [right|best] for {food}?",
        "I [want|would like] to bake {food}. [Any advice?|What do I need to know?|How hot and how long?]",
        "[Please tell me|Tell me|Explain] how to bake {food}.",
    ),
    follow_ups=("And {food}?", "What about {food}?", "How does it work for {food}?"),
    slots=(
        (
            _oven("salmon", 15, 200, 400, "it flakes easily"),
            _oven("chicken", 40, 190, 375, "the juices run clear"),
            _oven("bread", 35, 220, 425, "the crust sounds hollow"),
            _oven("pizza", 12, 240, 475, "the edge is brown"),
            _oven("potatoes", 45, 200, 400, "a fork slides in"),
            _oven("cookies", 12, 180, 350, "the edges are golden"),
            _oven("lasagne", 40, 180, 350, "the top bubbles"),
            _oven("apple pie", 50, 190, 375, "the crust is golden"),
            _oven("muffins", 20, 190, 375, "a toothpick comes out clean"),
            _oven("carrots", 25, 200, 400, "the tips turn brown"),
            _oven("pumpkin", 30, 200, 400, "it feels soft"),
            _oven("cauliflower", 25, 220, 425, "the tips turn brown"),
        ),
    ),
    formal=Voice(
        core=(
            "I [recommend|would recommend|would suggest] baking {food} at {temp} for {time}.",
            "Please bake {food} at {temp} for [approximately|about] {time}.",
            "It is [best|advisable] to bake {food} for {time} at {temp}.",
        ),
        extra=(
            "Please [allow the oven to reach|preheat the oven to] {temp} before you [begin|put anything inside].",
            "The {food} will be ready when {sign}, which you may check near the end.",
            "Kindly leave some space around the {food}, in order that the hot air can circulate.",
            "You may wish to allow a rest of several minutes before serving.",
        ),
    ),
    casual=Voice(
        core=(
            "Just [bake|pop|stick] {food} [|in the oven] at {temp} for {time}.",
            "{time} at {temp} and you're [done|good to go]!",
            "[Pop|Stick] {food} in the oven at {temp}, and it's done in {time}!",
        ),
        extra=(
            "Don't forget to [heat|crank] the oven up to {temp} first, it really helps.",
            "You'll know it's done when {sign}, so [just|] peek in near the end.",
            "Don't cram the tray full, it's way better with a bit of space.",
            "Let it chill for a few minutes and then [dig in|enjoy], it's super tasty!",
        ),
    ),
)


def _pot(food: str, minutes: int, metric: str, imperial: str) -> dict[str, str | tuple[str, str]]:
    return {"food": food, "time": f"{minutes} minutes", "water": (f"{metric} of water", f"{imperial} of water")}


POT = Topic(
    name="pot",
    weight=1.6,
    has_units=True,
    questions=(
        "How [do|should|can] I cook {food}?",
        "How long [do|should] I boil {food}?",
        "How much water [do I need for|goes with] {food}?",
        "[Please tell me|Tell me|Explain] how to cook {food}.",
    ),
    follow_ups=("And {food}?", "What about {food}?", "How about {food}?"),
    slots=(
        (
            _pot("pasta", 9, "1 litre", "4 cups"),
            _pot("rice", 12, "300 ml", "1 cup"),
            _pot("eggs", 7, "500 ml", "2 cups"),
            _pot("lentils", 20, "600 ml", "3 cups"),
            _pot("broccoli", 4, "500 ml", "2 cups"),
            _pot("green beans", 6, "1 litre", "4 cups"),
            _pot("noodles", 4, "1 litre", "4 cups"),
            _pot("oats", 5, "300 ml", "1 cup"),
            _pot("corn", 8, "2 litres", "8 cups"),
            _pot("peas", 3, "300 ml", "1 cup"),
        ),
    ),
    formal=Voice(
        core=(
            "I [recommend|would suggest] boiling {food} in {water} for {time}.",
            "Please cook {food} for {time} in {water}.",
            "It is [sufficient|best] to simmer {food} in {water} for {time}.",
        ),
        extra=(
            "Please bring the water to a boil before you add the {food}.",
            "You may add a small amount of salt, provided that this suits your taste.",
            "It is advisable to taste the {food} after {time} and to adjust if necessary.",
            "Kindly drain the {food} carefully, as the steam is extremely hot.",
        ),
    ),
    casual=Voice(
        core=(
            "Just [boil|cook] {food} in {water} for {time}.",
            "{water}, {time}, and you're good to go with {food}!",
            "[Grab|Get] {water} and let the {food} bubble for {time}, that's it!",
        ),
        extra=(
            "Get the water bubbling first, then [toss|chuck] in the {food}.",
            "Throw in a bit of salt if you're into that.",
            "Try some after {time}, and if it's not soft yet, don't panic, just give it another minute.",
            "Watch out when you drain the {food}, that steam's super hot!",
        ),
    ),
)


def _brew(drink: str, minutes: int, celsius: int, fahrenheit: int, dose: str) -> dict[str, str | tuple[str, str]]:
    return {
        "drink": drink,
        "time": f"{minutes} minutes",
        "temp": (f"{celsius} °C", f"{fahrenheit} °F"),
        "cup": ("250 ml", "8 ounces"),
        "dose": dose,
    }


BREW = Topic(
    name="brew",
    weight=1.4,
    has_units=True,
    questions=(
        "How [do|should|can] I make {drink}?",
        "How hot should the water be for {drink}?",
        "What is the best way to [make|brew] {drink}?",
        "I [want|would like] a good cup of {drink}. [Any advice?|How do I make it?]",
    ),
    follow_ups=("And {drink}?", "What about {drink}?"),
    slots=(
        (
            _brew("green tea", 2, 80, 175, "one spoon of leaves"),
            _brew("black tea", 4, 95, 205, "one spoon of leaves"),
            _brew("white tea", 3, 75, 165, "two spoons of leaves"),
            _brew("mint tea", 7, 95, 205, "a handful of mint"),
            _brew("filter coffee", 4, 93, 200, "two spoons of coffee"),
            _brew("herbal tea", 6, 95, 205, "two spoons of herbs"),
            _brew("ginger tea", 10, 95, 205, "a few slices of ginger"),
        ),
    ),
    formal=Voice(
        core=(
            "I [recommend|would suggest] brewing {drink} at {temp} for {time}.",
            "Please brew {drink} with {dose} and {cup} of water at {temp}.",
            "It is best to steep {drink} for {time} at {temp}.",
        ),
        extra=(
            "Please use {dose} for each {cup} of fresh water.",
            "It is important that the water does not exceed {temp}, as the taste would suffer.",
            "After {time}, you may strain the {drink} and serve it immediately.",
            "Should you prefer a milder cup, I would suggest a shorter brewing time.",
        ),
    ),
    casual=Voice(
        core=(
            "Just brew {drink} at {temp} for {time}.",
            "Grab {dose} and {cup} of water at {temp}, and you're set!",
            "[Let|Just let] {drink} sit for {time} at {temp}, it's that easy!",
        ),
        extra=(
            "You'll want {dose} for every {cup} of fresh water.",
            "Don't go hotter than {temp}, or it'll taste kinda bitter.",
            "After {time} you're good, just strain the {drink} and enjoy!",
            "If that's a bit strong for you, just don't wait that long next time.",
        ),
    ),
)

FRIDGE = Topic(
    name="fridge",
    weight=1.2,
    has_units=True,
    questions=(
        "How long does {food} keep in the fridge?",
        "Is {food} still good after a few days?",
        "How [do|should] I store {food}?",
        "When does {food} go bad?",
    ),
    follow_ups=("And {food}?", "What about {food}?"),
    slots=(
        tuple(
            {"food": food, "keeps": keeps, "temp": ("4 °C", "39 °F"), "sniff": sniff}
            for food, keeps, sniff in (
                ("milk", "5 days", "smells sour"),
                ("soup", "3 days", "smells odd"),
                ("cooked rice", "2 days", "feels slimy"),
                ("fresh fish", "1 day", "smells strong"),
                ("yoghurt", "10 days", "shows mould"),
                ("cheese", "3 weeks", "shows mould"),
                ("butter", "4 weeks", "smells sour"),
                ("salad", "2 days", "feels slimy"),
                ("ham", "4 days", "smells odd"),
            )
        ),
    ),
    formal=Voice(
        core=(
            "I [recommend|would suggest] keeping {food} for [at most|no longer than] {keeps} at {temp}.",
            "It is safe to keep {food} for {keeps} at {temp}.",
            "Please use {food} within {keeps} and store it at {temp}.",
        ),
        extra=(
            "Please discard the {food} immediately should you notice that it {sniff}.",
            "It is advisable to keep it in a closed container on the lowest shelf.",
            "You may wish to write the date on the container, so that no doubt can arise.",
            "Kindly return the {food} to the fridge directly after each use.",
        ),
    ),
    casual=Voice(
        core=(
            "{food} is fine for {keeps} at {temp}, don't worry!",
            "You've got {keeps} with {food} if it's at {temp}.",
            "Just eat {food} within {keeps} and keep it at {temp}.",
        ),
        extra=(
            "If the {food} {sniff}, don't risk it, just toss it.",
            "Stick it in a closed box on the lowest shelf, that's the coolest spot.",
            "Scribble the date on the box so you don't have to guess later.",
            "Don't leave the {food} out on the table, it'll go off way faster.",
        ),
    ),
)

COOK_WITH = Topic(
    name="cook_with",
    weight=1.2,
    questions=(
        "What can I cook with {a} and {b}?",
        "I have {a} and {b}. What [should|can] I make?",
        "Give me an idea for [dinner|lunch] with {a} and {b}.",
        "I only have {a} and {b} left. [Any ideas?|What now?]",
    ),
    follow_ups=("And with {a} and {b}?", "What about {a} and {b}?"),
    slots=(
        tuple(
            {"a": a, "dish": dish, "time": time}
            for a, dish, time in (
                ("eggs", "an omelette", "10 minutes"),
                ("pasta", "a pasta salad", "15 minutes"),
                ("rice", "a fried rice", "20 minutes"),
                ("potatoes", "a potato pan", "30 minutes"),
                ("lentils", "a lentil stew", "35 minutes"),
                ("chickpeas", "a curry", "25 minutes"),
                ("bread", "a toasted sandwich", "10 minutes"),
                ("tofu", "a stir fry", "15 minutes"),
            )
        ),
        tuple(
            {"b": b}
            for b in ("spinach", "tomatoes", "cheese", "mushrooms", "onions", "peppers", "carrots", "beans", "herbs")
        ),
    ),
    formal=Voice(
        core=(
            "I [recommend|would suggest] {dish} with {a} and {b}.",
            "You may prepare {dish} with {a} and {b} in {time}.",
            "It would be a good choice to prepare {dish} with {b}.",
        ),
        extra=(
            "Please begin with the {b}, which should be washed and cut into small pieces.",
            "The preparation requires approximately {time} and very few tools.",
            "You may season the dish with salt, pepper and a little oil.",
            "Should anything remain, it is suitable for lunch on the following day.",
        ),
    ),
    casual=Voice(
        core=(
            "Just [make|throw together] {dish} with {a} and {b}!",
            "How about {dish}? It's great with {b}!",
            "{dish} with {a} and {b}, that's [super easy|a sure hit]!",
        ),
        extra=(
            "Wash the {b} first and just chop it all up, nothing fancy.",
            "It's only like {time} and you won't need much stuff.",
            "Toss in some salt, pepper and a splash of oil, and you're golden.",
            "If there's anything left, it's awesome for lunch tomorrow.",
        ),
    ),
)

TOPICS = (OVEN, POT, BREW, FRIDGE, COOK_WITH)
