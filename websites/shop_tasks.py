"""The shop's templates of tasks.

Their order, and the order of the random draws, must not change.
"""

from websites.shop import CATEGORIES, EMMA, MONTHS, TOTAL
from websites.site import money
from websites.templates import (
    SiteTemplates, at, click, exactly, impossible, pick, says, shows, write,
)

SHOP = "__SHOPPING__"
TASKS = SiteTemplates("shop")


def find_product(name):
    """The steps that lead to a product's page."""
    return [write("Search the shop", name, 1, "searchbox"), click("link", name)]


def any_product(db, where="1"):
    """A random product -> (id, name, price in cents)."""
    return db.any(f"select id,name,price from product where {where} order by id")


# ---- navigate ----


@TASKS.add("navigate", "Show me the products of the category {category}.")
def category(db, rng):
    name = rng.choice(list(CATEGORIES))
    return {"category": name}, at(f"{SHOP}/category/{name.lower()}"), [click("link", name)]


@TASKS.add("navigate", "Show me the category {category}, cheapest products first.")
def cheapest(db, rng):
    name = rng.choice(list(CATEGORIES))
    check = at(f"{SHOP}/category/{name.lower()}?sort=price")
    return {"category": name}, check, [click("link", name), click("link", "Cheapest first")]


@TASKS.add("navigate", "Open the page of the product {product}.")
def open_product(db, rng):
    product_id, name, _ = any_product(db)
    return {"product": name}, at(f"{SHOP}/product/{product_id}"), find_product(name)


@TASKS.add("navigate", "Open my {page}.")
def open_own_page(db, rng):
    page, name, path = rng.choice([
        ("list of orders", "My orders", "/orders"), ("wish list", "Wish list", "/wishlist"),
        ("account", "Account", "/account"),
    ])
    return {"page": page}, at(SHOP + path), [click("link", name)]


# ---- find ----


@TASKS.add("find", "What does the product {product} cost?")
def price(db, rng):
    _, name, cents = any_product(db)
    check = says(money(cents).strip("$"))
    return {"product": name}, check, find_product(name), money(cents)


@TASKS.add("find", "What material is the {product} made of?")
def material(db, rng):
    product_id, name, _ = any_product(db)
    answer = db.value("select material from product where id=?", product_id)
    return {"product": name}, says(answer), find_product(name), answer


@TASKS.add("find", "What is the total of my order #{number}?")
def order_total(db, rng):
    number, cents = db.any(
        f"select number,{TOTAL} from orders where customer=? order by number desc limit 10", EMMA)
    plan = [click("link", "My orders"), click("link", f"#{number}")]
    return {"number": number}, says(money(cents).strip("$")), plan, money(cents)


@TASKS.add(
    "find",
    "How much did I spend in {month} {year}, canceled orders left out? "
    "Answer with the sum, such as $12.34.",
)
def spent(db, rng):
    year, month = db.any(
        "select distinct substr(date,1,4), substr(date,6,2) from orders "
        "where customer=? and state!='Canceled' order by 1, 2",
        EMMA)
    cents = db.value(
        f"select sum({TOTAL}) from orders "
        "where customer=? and state!='Canceled' and date like ?",
        EMMA, f"{year}-{month}-%")
    values = {"month": MONTHS[int(month) - 1], "year": year}
    return values, exactly(money(cents)), [click("link", "My orders")], money(cents)


@TASKS.add(
    "find", "Who wrote the reviews with {stars} star(s) of the product {product}? Give all names."
)
def reviewers(db, rng):
    product_id, name, stars = db.any(
        "select distinct product.id,name,stars "
        "from review join product on product.id=product "
        "where review.state='Approved' order by 1, 3")
    rows = db.rows(
        "select author from review where product=? and stars=? and state='Approved'",
        product_id, stars)
    authors = [author for (author,) in rows]
    values = {"product": name, "stars": stars}
    return values, says(*authors), find_product(name), ", ".join(authors)


# ---- change ----


@TASKS.add("change", "Put {amount} of {product} in my cart.")
def to_cart(db, rng):
    _, name, cents = any_product(db, "stock>0")
    amount = rng.randint(2, 9)
    check = shows((f"{SHOP}/cart", "table.lines", [name, money(amount * cents)]))
    plan = [*find_product(name), write("Quantity", str(amount)), click("button", "Add to cart")]
    return {"product": name, "amount": amount}, check, plan


@TASKS.add("change", "Add {product} to my wish list.")
def to_wishes(db, rng):
    _, name, _ = any_product(db)
    check = shows((f"{SHOP}/wishlist", "table.lines", [name]))
    return {"product": name}, check, [*find_product(name), click("button", "Add to wish list")]


@TASKS.add("change", "Buy one {product} with {shipping} shipping.")
def buy(db, rng):
    _, name, cents = any_product(db, "stock>0")
    shipping = rng.choice(["Standard", "Express"])
    number = int(db.value("select max(number) from orders")) + 1
    facts = [name, f"Shipping: {shipping}", f"Total {money(cents)}"]
    check = shows((f"{SHOP}/orders/{number:09}", "main", facts))
    plan = [
        *find_product(name), click("button", "Add to cart"), click("link", "Proceed to checkout"),
        pick(shipping), click("button", "Place order"),
    ]
    return {"product": name, "shipping": shipping}, check, plan


@TASKS.add("change", "Write a review of {product} with {stars} stars and the title \"{title}\".")
def write_review(db, rng):
    product_id, name, _ = any_product(db)
    stars = rng.randint(2, 4)
    title = rng.choice(["As expected", "Does its job", "Good for the price", "Not for me"])
    facts = [title, "★" * stars + "☆", "by Emma Lopez"]
    check = shows((f"{SHOP}/product/{product_id}", "main .box", facts))
    plan = [
        *find_product(name), click("link", "Write a review"), pick(f"{stars} stars"),
        write("Title", title), click("button", "Send review"),
    ]
    return {"product": name, "stars": stars, "title": title}, check, plan


@TASKS.add("change", "I have moved: change my address to {street}, {city}, postcode {postcode}.")
def move(db, rng):
    street = f"{rng.randint(100, 999)} {rng.choice('Elm Birch Cedar Maple'.split())} Lane"
    city = rng.choice("Linholt Otterby Penrick Stowick".split())
    postcode = rng.randint(10000, 99999)
    check = shows((f"{SHOP}/account", ".address", [street, city, str(postcode)]))
    plan = [
        click("link", "Account"), click("link", "Change address"), write("Street", street),
        write("City", city), write("Postcode", str(postcode)), click("button", "Save address"),
    ]
    return {"street": street, "city": city, "postcode": postcode}, check, plan


@TASKS.add("change", "Cancel my most recent order.")
def cancel(db, rng):
    number = db.value("select max(number) from orders where customer=?", EMMA)
    state = db.value("select state from orders where number=?", number)
    plan = [click("link", "My orders"), click("link", f"#{number}")]
    if state != "Pending":
        check = impossible("The order is being processed already, and cannot be canceled.")
        return {}, check, plan, "N/A"
    check = shows((f"{SHOP}/orders/{number}", "main", ["Canceled"]))
    return {}, check, [*plan, click("button", "Cancel order")]


# ---- impossible ----


@TASKS.add("impossible", "What is the delivery date of my order #{number}?")
def no_order(db, rng):
    number = f"{int(db.value('select max(number) from orders')) + rng.randint(50, 900):09}"
    check = impossible("I have no such order.")
    return {"number": number}, check, [click("link", "My orders")], "N/A"


@TASKS.add("impossible", "How many calories does the {product} have?")
def no_such_fact(db, rng):
    _, name, _ = any_product(db)
    return {"product": name}, impossible("The shop does not say."), find_product(name), "N/A"
